"""A server that answers as it is told, without a network or a clock, and both clients behind one face."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Protocol

import httpx

from service.client import AsyncClient, Client, Clock

URL = "http://server.test"
WALL = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT


class Time:
    """A clock that only sleeping moves. Chance is always in the middle.

    Attributes:
        waits: what was slept, in order.
    """

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.clock = Clock(lambda: sum(self.waits), lambda: WALL + sum(self.waits), lambda: 0.5)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.waits.append(seconds)


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in pieces, the last of which may be an error.

    Attributes:
        taken: pieces that were read.
        is_closed: whether the client has let go of it.
    """

    def __init__(self, pieces: Iterable[bytes | Exception]) -> None:
        self._pieces = list(pieces)
        self.taken = 0
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self.taken += 1
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

    def close(self) -> None:
        self.is_closed = True

    async def aclose(self) -> None:
        self.is_closed = True


class Script(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Gives one answer after another.

    Attributes:
        requests: that came.
    """

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self._answers = list(answers)
        self.requests: list[httpx.Request] = []

    @property
    def is_done(self) -> bool:
        """Whether every answer was asked for."""
        return not self._answers

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)

    @property
    def bodies(self) -> list[Any]:
        """The JSON that came."""
        return [json.loads(request.content) for request in self.requests]


class Driver(Protocol):
    """One of the two clients, made for one call."""

    def call(self, script: Script, time: Time, method: str, *given: Any, options: Any = None, **fields: Any) -> Any:
        """Call a method and return what it does."""
        ...

    def stream(
        self, script: Script, time: Time, method: str, into: list[Any], *, take: int | None = None, **fields: Any
    ) -> str | None:
        """Read a stream into a list, to its end or until so many chunks came; returns the request's id."""
        ...


class BlockingDriver:
    def call(self, script: Script, time: Time, method: str, *given: Any, options: Any = None, **fields: Any) -> Any:
        with Client(URL, transport=script, sleep=time.sleep, clock=time.clock, **(options or {})) as client:
            return getattr(client, method)(*given, **fields)

    def stream(
        self, script: Script, time: Time, method: str, into: list[Any], *, take: int | None = None, **fields: Any
    ) -> str | None:
        with (
            Client(URL, transport=script, sleep=time.sleep, clock=time.clock) as client,
            getattr(client, method)(**fields) as stream,
        ):
            for chunk in stream:
                into.append(chunk)
                if len(into) == take:
                    break
            request_id: str | None = stream.request_id
            return request_id


class AsyncDriver:
    def call(self, script: Script, time: Time, method: str, *given: Any, options: Any = None, **fields: Any) -> Any:
        async def run() -> Any:
            async with AsyncClient(
                URL, transport=script, sleep=time.sleep_async, clock=time.clock, **(options or {})
            ) as client:
                return await getattr(client, method)(*given, **fields)

        return asyncio.run(run())

    def stream(
        self, script: Script, time: Time, method: str, into: list[Any], *, take: int | None = None, **fields: Any
    ) -> str | None:
        async def run() -> str | None:
            async with (
                AsyncClient(URL, transport=script, sleep=time.sleep_async, clock=time.clock) as client,
                getattr(client, method)(**fields) as stream,
            ):
                async for chunk in stream:
                    into.append(chunk)
                    if len(into) == take:
                        break
                request_id: str | None = stream.request_id
                return request_id

        return asyncio.run(run())


def events(*data: object) -> bytes:
    """A stream of events: strings as they are, all else as JSON."""
    return "".join(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n" for each in data).encode()
