"""The client for threads: sends, sleeps, and leaves all else to the modules that it shares with the one for asyncio."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class Stream(Generic[Chunk]):
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

    def __iter__(self) -> Iterator[Chunk]:
        """
        Raises:
            ApiError: the request failed after the stream had begun.
            BrokenAnswerError: the stream broke off, or an event cannot be read.
        """
        try:
            for received in self._response.iter_bytes():
                yield from self._reader.feed(received)
        except httpx.HTTPError as error:
            raise self._translate(error) from error
        self._reader.finish()


class Client:
    """A client of one server, for use by any number of threads.

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
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], object] = time.sleep,
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
        self._http = httpx.Client(**http_options(base_url, api_key, timeout, max_connections), transport=transport)
        self._timeout = timeout
        self._retries = retries
        self._sleep = sleep
        self._clock = clock or Clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def generate(self, *, request_id: str | None = None, **fields: Unpack[GenerateFields]) -> GenerateResponse:
        """POST /generate: text after a prompt, in the server's own shape."""
        return self.send(calls.generate(fields), request_id=request_id).value

    def complete(self, *, request_id: str | None = None, **fields: Unpack[CompletionFields]) -> CompletionResponse:
        """POST /v1/completions: text after a prompt, in OpenAI's shape."""
        return self.send(calls.complete(fields), request_id=request_id).value

    def chat(self, *, request_id: str | None = None, **fields: Unpack[ChatFields]) -> ChatResponse:
        """POST /v1/chat/completions: the answer to a conversation."""
        return self.send(calls.chat(fields), request_id=request_id).value

    @contextmanager
    def stream_generate(
        self, *, request_id: str | None = None, **fields: Unpack[GenerateFields]
    ) -> Iterator[Stream[GenerateChunk | GenerateResponse]]:
        """The same as `generate`, as it comes; the last chunk is a `GenerateResponse`."""
        with self.stream(calls.stream_generate(fields), request_id=request_id) as stream:
            yield stream

    @contextmanager
    def stream_complete(
        self, *, request_id: str | None = None, **fields: Unpack[StreamedCompletionFields]
    ) -> Iterator[Stream[CompletionResponse]]:
        """The same as `complete`, as it comes."""
        with self.stream(calls.stream_complete(fields), request_id=request_id) as stream:
            yield stream

    @contextmanager
    def stream_chat(
        self, *, request_id: str | None = None, **fields: Unpack[StreamedChatFields]
    ) -> Iterator[Stream[ChatChunk]]:
        """The same as `chat`, as it comes."""
        with self.stream(calls.stream_chat(fields), request_id=request_id) as stream:
            yield stream

    def plan(self, **fields: Unpack[PlanFields]) -> PlanResponse:
        """POST /v1/rope/plan: the plan that a request would get, and why."""
        return self.send(calls.plan(fields)).value

    def tokenize(self, **fields: Unpack[TokenizeFields]) -> TokenizeResponse:
        """POST /tokenize: the token ids of a text or a conversation."""
        return self.send(calls.tokenize(fields)).value

    def detokenize(self, tokens: list[int]) -> DetokenizeResponse:
        """POST /detokenize: the text of token ids."""
        return self.send(calls.detokenize(tokens)).value

    def models(self) -> ModelList:
        """GET /v1/models: what is served."""
        return self.send(calls.models()).value

    def model(self, name: str) -> ModelCard:
        """GET /v1/models/{id}: the served model, by its name."""
        return self.send(calls.model(name)).value

    def health(self) -> Status:
        """GET /health: returns while the server is alive, else raises ApiError with the reason; one try."""
        return self.send(calls.health()).value

    def ready(self) -> Status:
        """GET /ready: returns while requests are served, else raises ApiError with the reason; one try."""
        return self.send(calls.ready()).value

    def metrics(self) -> str:
        """GET /metrics: in Prometheus' text format."""
        return self.send(calls.metrics()).value

    def send(self, call: Call[Answer], *, request_id: str | None = None) -> Reply[Answer]:
        """Make any call of `service.client.calls`, or one of your own; the methods above are short for this.

        Args:
            call: what to ask.
            request_id: sent as `X-Request-Id`; the server makes one up where there is none.

        Returns:
            The answer, with the request's id.
        """
        response = self._open(call, request_id, self._retries if call.is_retried else 0)
        try:
            return read_reply(call, response.read(), request_id_of(response))
        except httpx.HTTPError as error:
            raise self._failure_of(error) from error
        finally:
            response.close()

    @contextmanager
    def stream(self, call: StreamCall[Chunk], *, request_id: str | None = None) -> Iterator[Stream[Chunk]]:
        """Make any streamed call. Leaving the block early closes the connection, by which the server's request ends."""
        response = self._open(call, request_id, self._retries)
        try:
            yield Stream(call, response, self._failure_of)
        finally:
            response.close()

    def _open(self, call: Call[Any] | StreamCall[Any], request_id: str | None, retries: int) -> httpx.Response:
        """A successful answer, its body not read yet."""
        attempts = Attempts(retries, self._timeout, self._clock)
        request = self._http.build_request(**request_options(call, request_id))
        while True:
            try:
                response = self._http.send(request, stream=True)
                if response.is_success:
                    return response
                try:
                    response.read()
                finally:
                    response.close()
                wait = attempts.wait_after(error_of(response, self._clock))
            except httpx.HTTPError as error:
                failure = self._failure_of(error)
                failure.__cause__ = error
                wait = attempts.wait_after(failure)
            self._sleep(wait)

    def _failure_of(self, error: httpx.HTTPError) -> ClientError:
        return failure_of(error, self._http.base_url, self._timeout)
