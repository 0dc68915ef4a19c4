"""The client for asyncio: sends, sleeps, and leaves all else to the modules that it shares with the one for threads."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Generic, Self, Unpack

import httpx

from service.api.responses import (
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    GenerateChunk,
    GenerateResponse,
    ModelCard,
    ModelList,
    PlanResponse,
    TokenizeResponse,
)
from service.client import calls
from service.client.calls import Answer, Call, Chunk, Status, StreamCall
from service.client.errors import ClientError
from service.client.fields import (
    ChatFields,
    CompletionFields,
    GenerateFields,
    PlanFields,
    StreamedChatFields,
    StreamedCompletionFields,
    TokenizeFields,
)
from service.client.reading import Reply, StreamReader, read_reply
from service.client.retrying import Attempts, Clock
from service.client.transport import error_of, failure_of, http_options, request_id_of, request_options


class AsyncStream(Generic[Chunk]):
    """The chunks of one streamed answer, read as they come.

    Attributes:
        request_id: under which the server logs the request, None where it names none.
    """

    def __init__(
        self, call: StreamCall[Chunk], response: httpx.Response, translate: Callable[[httpx.HTTPError], ClientError]
    ) -> None:
        self.request_id = request_id_of(response)
        self._reader = StreamReader(call, self.request_id)
        self._response = response
        self._translate = translate

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """
        Raises:
            ApiError: the request failed after the stream had begun.
            BrokenAnswerError: the stream broke off, or an event cannot be read.
        """
        try:
            async for received in self._response.aiter_bytes():
                for chunk in self._reader.feed(received):
                    yield chunk
        except httpx.HTTPError as error:
            raise self._translate(error) from error
        self._reader.finish()


class AsyncClient:
    """A client of one server, for use by any number of tasks of one event loop.

    The methods are the API's routes; their keyword arguments are the fields of the request. All of them raise
    `ClientError`: see `service.client.errors`.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        retries: int = 2,
        max_connections: int | None = 100,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            base_url: the server's address, with or without `/v1` at its end.
            api_key: sent as a bearer key.
            timeout: seconds that the server may be silent, and after which no further try is begun. An answer in one
                piece is silent until it is whole.
            retries: tries after the first, at most, where the server is busy (429, 503) or cannot be connected to. A
                stream that has begun is never tried again.
            max_connections: at a time; a call beyond waits for one. None for no limit.
            transport: of httpx, instead of the network and the proxies that the environment names.
            sleep: waits so many seconds.
            clock: tells the time, for retries; the system's where left out.

        Raises:
            ValueError: the address is none.
        """
        self._http = httpx.AsyncClient(**http_options(base_url, api_key, timeout, max_connections), transport=transport)
        self._timeout = timeout
        self._retries = retries
        self._sleep = sleep
        self._clock = clock or Clock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def generate(self, *, request_id: str | None = None, **fields: Unpack[GenerateFields]) -> GenerateResponse:
        """POST /generate: text after a prompt, in the server's own shape."""
        return (await self.send(calls.generate(fields), request_id=request_id)).value

    async def complete(
        self, *, request_id: str | None = None, **fields: Unpack[CompletionFields]
    ) -> CompletionResponse:
        """POST /v1/completions: text after a prompt, in OpenAI's shape."""
        return (await self.send(calls.complete(fields), request_id=request_id)).value

    async def chat(self, *, request_id: str | None = None, **fields: Unpack[ChatFields]) -> ChatResponse:
        """POST /v1/chat/completions: the answer to a conversation."""
        return (await self.send(calls.chat(fields), request_id=request_id)).value

    @asynccontextmanager
    async def stream_generate(
        self, *, request_id: str | None = None, **fields: Unpack[GenerateFields]
    ) -> AsyncIterator[AsyncStream[GenerateChunk | GenerateResponse]]:
        """The same as `generate`, as it comes; the last chunk is a `GenerateResponse`."""
        async with self.stream(calls.stream_generate(fields), request_id=request_id) as stream:
            yield stream

    @asynccontextmanager
    async def stream_complete(
        self, *, request_id: str | None = None, **fields: Unpack[StreamedCompletionFields]
    ) -> AsyncIterator[AsyncStream[CompletionResponse]]:
        """The same as `complete`, as it comes."""
        async with self.stream(calls.stream_complete(fields), request_id=request_id) as stream:
            yield stream

    @asynccontextmanager
    async def stream_chat(
        self, *, request_id: str | None = None, **fields: Unpack[StreamedChatFields]
    ) -> AsyncIterator[AsyncStream[ChatChunk]]:
        """The same as `chat`, as it comes."""
        async with self.stream(calls.stream_chat(fields), request_id=request_id) as stream:
            yield stream

    async def plan(self, **fields: Unpack[PlanFields]) -> PlanResponse:
        """POST /v1/rope/plan: the plan that a request would get, and why."""
        return (await self.send(calls.plan(fields))).value

    async def tokenize(self, **fields: Unpack[TokenizeFields]) -> TokenizeResponse:
        """POST /tokenize: the token ids of a text or a conversation."""
        return (await self.send(calls.tokenize(fields))).value

    async def detokenize(self, tokens: list[int]) -> DetokenizeResponse:
        """POST /detokenize: the text of token ids."""
        return (await self.send(calls.detokenize(tokens))).value

    async def models(self) -> ModelList:
        """GET /v1/models: what is served."""
        return (await self.send(calls.models())).value

    async def model(self, name: str) -> ModelCard:
        """GET /v1/models/{id}: the served model, by its name."""
        return (await self.send(calls.model(name))).value

    async def health(self) -> Status:
        """GET /health: returns while the server is alive, else raises ApiError with the reason; one try."""
        return (await self.send(calls.health())).value

    async def ready(self) -> Status:
        """GET /ready: returns while requests are served, else raises ApiError with the reason; one try."""
        return (await self.send(calls.ready())).value

    async def metrics(self) -> str:
        """GET /metrics: in Prometheus' text format."""
        return (await self.send(calls.metrics())).value

    async def send(self, call: Call[Answer], *, request_id: str | None = None) -> Reply[Answer]:
        """Make any call of `service.client.calls`, or one of your own; the methods above are short for this.

        Args:
            call: what to ask.
            request_id: sent as `X-Request-Id`; the server makes one up where there is none.

        Returns:
            The answer, with the request's id.
        """
        response = await self._open(call, request_id, self._retries if call.is_retried else 0)
        try:
            return read_reply(call, await response.aread(), request_id_of(response))
        except httpx.HTTPError as error:
            raise self._failure_of(error) from error
        finally:
            await response.aclose()

    @asynccontextmanager
    async def stream(
        self, call: StreamCall[Chunk], *, request_id: str | None = None
    ) -> AsyncIterator[AsyncStream[Chunk]]:
        """Make any streamed call. Leaving the block early closes the connection, by which the server's request ends."""
        response = await self._open(call, request_id, self._retries)
        try:
            yield AsyncStream(call, response, self._failure_of)
        finally:
            await response.aclose()

    async def _open(self, call: Call[Any] | StreamCall[Any], request_id: str | None, retries: int) -> httpx.Response:
        """A successful answer, its body not read yet."""
        attempts = Attempts(retries, self._timeout, self._clock)
        request = self._http.build_request(**request_options(call, request_id))
        while True:
            try:
                response = await self._http.send(request, stream=True)
                if response.is_success:
                    return response
                try:
                    await response.aread()
                finally:
                    await response.aclose()
                wait = attempts.wait_after(error_of(response, self._clock))
            except httpx.HTTPError as error:
                failure = self._failure_of(error)
                failure.__cause__ = error
                wait = attempts.wait_after(failure)
            await self._sleep(wait)

    def _failure_of(self, error: httpx.HTTPError) -> ClientError:
        return failure_of(error, self._http.base_url, self._timeout)
