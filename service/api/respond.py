"""From an admitted request's events to an HTTP answer, whole or streamed.

A client that goes away cancels its request. Knows events and shapes; does not know how a request is admitted.
"""

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.sse import format_sse_event
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from service.api.answers import AnswerFormat, Ending, Header
from service.api.errors import error_body
from service.api.state import Server
from service.core import FinishEvent, FinishReason, TokenEvent
from service.engine.handle import RequestHandle
from service.errors import CancelledError, DeadlineError, GenerationError

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would hold tokens back
KEEPALIVE = format_sse_event(comment="keep-alive")


async def respond(
    request: Request, server: Server, handle: RequestHandle, answer: AnswerFormat, *, stream: bool
) -> Response:
    """Answer a request that has been admitted.

    Args:
        request: watched for the client's going away.
        server: gives names and settings.
        handle: the admitted request.
        answer: the route's shapes.
        stream: as server-sent events rather than in one piece.

    Raises:
        GenerationError, CancelledError, DeadlineError: the request ended badly; in a stream that is the last event
            instead.
    """
    header = Header(handle.sequence.request_id, server.inspected.name, server.inspected.policy.native_length)
    if not stream:
        ending = await _collect(request, handle, header)
        if handle.sequence.sampling.logprobs is None:
            return _json(answer.whole(ending))
        # A long answer has so many that they would hold up the event loop.
        return await asyncio.to_thread(lambda: _json(answer.whole(ending)))
    return EventStreamResponse(handle, _stream(handle, answer, header, server.settings.sse_keepalive_seconds))


class EventStreamResponse(StreamingResponse):
    """Server-sent events of one request, which is cancelled if its client goes away: Starlette then stops this
    response, wherever it is."""

    def __init__(self, handle: RequestHandle, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._handle.cancel()


async def _collect(request: Request, handle: RequestHandle, header: Header) -> Ending:
    watcher = asyncio.create_task(_cancel_on_disconnect(request, handle))
    try:
        tokens: list[TokenEvent] = []
        async for event in handle.events():
            if isinstance(event, FinishEvent):
                _check_ended_well(event, handle)
                return Ending(tokens, handle.sequence, event, header)
            tokens.append(event)
        raise AssertionError("a request ends in a FinishEvent")
    finally:
        watcher.cancel()
        handle.cancel()


async def _cancel_on_disconnect(request: Request, handle: RequestHandle) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    handle.cancel()


async def _stream(
    handle: RequestHandle, answer: AnswerFormat, header: Header, keepalive_seconds: float
) -> AsyncIterator[bytes]:
    for first in answer.begin(header):
        yield _event(first)
    async for event in _with_keepalive(handle, keepalive_seconds):
        for part in _parts(event, answer, handle, header):
            yield _event(part)
    if answer.closing is not None:
        yield format_sse_event(data_str=answer.closing)


async def _with_keepalive(handle: RequestHandle, seconds: float) -> AsyncIterator[TokenEvent | FinishEvent | None]:
    """The handle's events, and None whenever there was none for so many seconds."""
    event: TokenEvent | FinishEvent | None = None
    while not isinstance(event, FinishEvent):
        try:
            event = await handle.next_event(timeout=seconds)
        except TimeoutError:
            event = None
        yield event


def _parts(
    event: TokenEvent | FinishEvent | None, answer: AnswerFormat, handle: RequestHandle, header: Header
) -> list[BaseModel | None]:
    match event:
        case None:
            return [None]
        case TokenEvent():
            return list(answer.token(header, event))
        case FinishEvent():
            try:
                _check_ended_well(event, handle)
            except (GenerationError, CancelledError, DeadlineError) as error:
                return [error_body(error)]
            return list(answer.end(Ending([], handle.sequence, event, header)))


def _check_ended_well(event: FinishEvent, handle: RequestHandle) -> None:
    if handle.timeout is not None:
        raise DeadlineError(f"the request took longer than its timeout of {handle.timeout:g} seconds")
    if event.reason == FinishReason.ERROR:
        raise GenerationError(f"generation failed: {event.error or 'the engine has stopped'}")
    if event.reason == FinishReason.CANCELLED:
        raise CancelledError("the request was cancelled before its end: the server is shutting down")


def _event(part: BaseModel | None) -> bytes:
    return KEEPALIVE if part is None else format_sse_event(data_str=_dump(part))


def _json(body: BaseModel) -> Response:
    return Response(_dump(body), media_type=JSONResponse.media_type)


def _dump(body: BaseModel) -> str:
    return body.model_dump_json()
