"""From an admitted request's events to an HTTP answer, whole or streamed.

A client that goes away cancels its request. Knows events and shapes; does not know how a request is admitted.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.sse import format_sse_event
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from service.api.answers.base import AnswerFormat, Ending, Header
from service.api.errors import error_body
from service.api.state import Server
from service.core import FinishEvent, FinishReason, PromptEvent, TokenEvent
from service.engine.handle import ChoiceEvent, RequestHandle
from service.errors import CancelledError, DeadlineError, GenerationError
from service.tracing.hook import follow

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would hold tokens back
KEEPALIVE = format_sse_event(comment="keep-alive")


async def respond(
    request: Request,
    server: Server,
    handle: RequestHandle,
    answer: AnswerFormat,
    *,
    stream: bool,
    choices_per_prompt: int = 1,
) -> Response:
    """Answer a request that has been admitted.

    Args:
        request: watched for the client's going away.
        server: gives names and settings.
        handle: the admitted request.
        answer: the route's shapes.
        stream: as server-sent events rather than in one piece.
        choices_per_prompt: how many of its choices follow one prompt.

    Raises:
        GenerationError, CancelledError, DeadlineError: a choice ended badly, and with it the request; in a stream that
            is the last event instead.
    """
    follow(request.scope, handle, choices_per_prompt=choices_per_prompt)
    policy, choices = server.inspected.policy, len(handle.sequences)
    header = Header(handle.request_id, server.inspected.name, policy.native_length, choices, choices_per_prompt)
    if stream:
        return EventStreamResponse(handle, _stream(handle, answer, header, server.settings.sse_keepalive_seconds))
    endings = await _collect(request, handle, answer, header)
    sampling = handle.sequences[0].sampling
    if sampling.logprobs is None and sampling.prompt_logprobs is None:
        return _json(answer.whole(endings))
    # A long answer has so many that they would hold up the event loop.
    return await asyncio.to_thread(lambda: _json(answer.whole(endings)))


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


@dataclass
class _Gathered:
    """What has come of one choice so far."""

    prompt: list[TokenEvent] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)


async def _collect(request: Request, handle: RequestHandle, answer: AnswerFormat, header: Header) -> list[Ending]:
    watcher = asyncio.create_task(_cancel_on_disconnect(request, handle))
    gathered = [_Gathered() for _ in handle.sequences]
    endings: dict[int, Ending] = {}
    try:
        async for index, event in handle.events():
            of = gathered[index]
            match event:
                case PromptEvent():
                    of.prompt += event.tokens
                case TokenEvent():
                    of.tokens.append(event)
                    answer.keep(index, event)
                    if answer.is_complete(index):
                        handle.stop(index)
                case FinishEvent():
                    _check_ended_well(event, handle)
                    endings[index] = Ending(index, of.prompt, of.tokens, handle.sequences[index], event, header)
    finally:
        watcher.cancel()
        handle.cancel()
    return [endings[index] for index in sorted(endings)]


async def _cancel_on_disconnect(request: Request, handle: RequestHandle) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    handle.cancel()


async def _stream(
    handle: RequestHandle, answer: AnswerFormat, header: Header, keepalive_seconds: float
) -> AsyncIterator[bytes]:
    for first in answer.begin(header):
        yield _event(first)
    endings: dict[int, Ending] = {}
    while len(endings) < header.num_choices:
        try:
            index, event = await handle.next_event(timeout=keepalive_seconds)
        except TimeoutError:
            yield KEEPALIVE
            continue
        if isinstance(event, FinishEvent):
            try:
                _check_ended_well(event, handle)
            except (GenerationError, CancelledError, DeadlineError) as error:
                yield _event(error_body(error))
                break
            endings[index] = Ending(index, [], [], handle.sequences[index], event, header)
        for part in _parts(ChoiceEvent(index, event), answer, header, endings):
            yield _event(part)
        if answer.is_complete(index):
            handle.stop(index)
    else:
        for part in answer.close([endings[index] for index in sorted(endings)]):
            yield _event(part)
    if answer.closing is not None:
        yield format_sse_event(data_str=answer.closing)


def _parts(of: ChoiceEvent, answer: AnswerFormat, header: Header, endings: dict[int, Ending]) -> Iterable[BaseModel]:
    match of.event:
        case PromptEvent():
            return answer.prompt(header, of.choice, of.event.tokens)
        case TokenEvent():
            return answer.token(header, of.choice, of.event)
        case FinishEvent():
            return answer.end(endings[of.choice])


def _check_ended_well(event: FinishEvent, handle: RequestHandle) -> None:
    if event.reason == FinishReason.CANCELLED and handle.timeout is not None:
        raise DeadlineError(f"the request took longer than its timeout of {handle.timeout:g} seconds")
    if event.reason == FinishReason.ERROR:
        raise GenerationError(f"generation failed: {event.error or 'the engine has stopped'}")
    if event.reason == FinishReason.CANCELLED:
        raise CancelledError("the request was cancelled before its end: the server is shutting down")


def _event(part: BaseModel) -> bytes:
    return format_sse_event(data_str=_dump(part))


def _json(body: BaseModel) -> Response:
    return Response(_dump(body), media_type=JSONResponse.media_type)


def _dump(body: BaseModel) -> str:
    return body.model_dump_json()
