"""A request's way to a replica and its answer's way back. Knows that replicas can go away; not where they are.

Nothing is lost in silence: while the client has heard nothing, the request is tried once more with another replica;
after that a stream ends with an error, as one does whose step has failed.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from fastapi.responses import Response
from fastapi.sse import format_sse_event
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from service.api.errors import error_body
from service.errors import GenerationError, NotReadyError
from service.replicas.asgi import CarriedRequest
from service.replicas.placing import Beginning

ATTEMPTS = 2
"""Of a request: what has cost two replicas their lives does not get a third."""
GONE = "the replica that computed the request has gone"


class ReplicaGoneError(Exception):
    """A replica has died or was removed while it had a request."""


class Replicas(Protocol):
    """The replicas, wherever they are."""

    @property
    def names(self) -> Sequence[str]:
        """Of those that run."""
        ...

    def ask(
        self, request: CarriedRequest, *, beginning: Beginning | None = None, only: str | None = None
    ) -> AsyncIterator[list[Message]]:
        """Have a replica answer a request; whoever stops iterating cancels it.

        Args:
            request: to be answered.
            beginning: of the request.
            only: the replica's name, where it must be a certain one.

        Raises:
            ReplicaGoneError: the replica has gone.
            QueueFullError, NotReadyError: no replica took the request in time.
        """
        ...


class Forwarded(Response):
    """The answer of whichever replica a request is sent to."""

    def __init__(self, replicas: Replicas, request: CarriedRequest, beginning: Beginning | None) -> None:
        super().__init__()
        self._replicas = replicas
        self._request = request
        self._beginning = beginning

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, unless the client goes away first.

        Raises:
            RequestError: no replica answers.
        """
        del scope
        forwarding = asyncio.create_task(self._forward(send))
        leaving = asyncio.create_task(_wait_until_left(receive))
        try:
            await asyncio.wait({forwarding, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                forwarding.result()
        finally:
            leaving.cancel()
            forwarding.cancel()
            await asyncio.wait({forwarding})

    async def _forward(self, send: Send) -> None:
        answer = _Answer(send)
        for _ in range(ATTEMPTS):
            try:
                async with aclosing(self._replicas.ask(self._request, beginning=self._beginning)) as batches:  # type: ignore[type-var]
                    async for batch in batches:
                        await answer.take(batch)
                return
            except ReplicaGoneError:
                if answer.was_heard:
                    await answer.break_off(self._request.scope["path"])
                    return
        raise NotReadyError(f"{GONE}, and so has the next one that was tried")


class _Answer:
    """Messages of one answer, of which the head is held back until something of the body is there."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self._is_stream = False
        self.was_heard = False

    async def take(self, batch: list[Message]) -> None:
        for message in batch:
            if message["type"] == "http.response.start":
                self._head = message
                kind = Headers(raw=message["headers"]).get("content-type", "")
                self._is_stream = kind.startswith("text/event-stream")
                continue
            if self._head is not None:
                head, self._head = self._head, None
                self.was_heard = True
                await self._send(head)
            await self._send(message)

    async def break_off(self, path: str) -> None:
        """End an answer whose rest will not come.

        Raises:
            GenerationError: there is no way to say so in it: the connection has to break off.
        """
        error = GenerationError(GONE)
        if not self._is_stream:
            raise error
        events = format_sse_event(data_str=error_body(error).model_dump_json())
        if path.startswith("/v1/"):
            events += format_sse_event(data_str="[DONE]")
        await self._send({"type": "http.response.body", "body": events, "more_body": False})


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
