"""An HTTP request and its answer as data, to be carried from one process to another. Knows ASGI; does not know Ray."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

SCOPE = ("type", "method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "client", "server")
# Of this version an application asks `receive` whether its client is still there, as it does under uvicorn.
ASGI = {"version": "3.0", "spec_version": "2.3"}

_running: set[asyncio.Task[None]] = set()  # the event loop itself keeps no hold of tasks


@dataclass(frozen=True)
class CarriedRequest:
    """A request that has been read to its end.

    Attributes:
        scope: what ASGI says of it.
        body: all of it.
    """

    scope: dict[str, Any]
    body: bytes


def carried(scope: MutableMapping[str, Any], body: bytes) -> CarriedRequest:
    """A request without what belongs to the process that received it."""
    return CarriedRequest({name: scope[name] for name in SCOPE if name in scope}, body)


async def answer(app: ASGIApp, request: CarriedRequest) -> AsyncIterator[list[Message]]:
    """Have an application answer a request.

    Whoever stops iterating is to the application a client that goes away.

    Yields:
        What the application has sent since the last time, never nothing.
    """
    outbox: asyncio.Queue[Message | None] = asyncio.Queue()
    has_left = asyncio.Event()
    scope: Scope = {**request.scope, "asgi": ASGI, "root_path": ""}
    body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        outbox.put_nowait(message)

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            outbox.put_nowait(None)

    task = asyncio.create_task(run())
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        while (batch := await _next_batch(outbox))[-1] is not None:
            yield [message for message in batch if message is not None]
        if len(batch) > 1:
            yield [message for message in batch if message is not None]
        await task
    finally:
        has_left.set()


async def _next_batch(outbox: asyncio.Queue[Message | None]) -> list[Message | None]:
    """All there is, once there is something."""
    batch = [await outbox.get()]
    while not outbox.empty():
        batch.append(outbox.get_nowait())
    return batch
