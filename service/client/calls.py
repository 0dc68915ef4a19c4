"""Every call of the API: where it goes, what it carries and how its answer is read. Sends nothing.

Fields of an answer that are not known here are ignored, so that a newer server can be asked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter

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
from service.client.fields import (
    ChatFields,
    CompletionFields,
    GenerateFields,
    PlanFields,
    StreamedChatFields,
    StreamedCompletionFields,
    TokenizeFields,
)

Answer = TypeVar("Answer")
Chunk = TypeVar("Chunk")


class Status(BaseModel):
    """Answer of GET /health and GET /ready."""

    status: str
    model: str | None = None


@dataclass(frozen=True)
class Call(Generic[Answer]):
    """A call with an answer in one piece.

    Attributes:
        method: of HTTP.
        path: below the server's address.
        body: sent as JSON; None for no body.
        read: from the answer's body to a value; ValueError where it is no such answer.
        is_retried: whether a busy server is asked again.
    """

    method: str
    path: str
    body: Mapping[str, Any] | None
    read: Callable[[bytes], Answer]
    is_retried: bool = True


@dataclass(frozen=True)
class StreamCall(Generic[Chunk]):
    """A call with server-sent events as its answer.

    Attributes:
        path: below the server's address, for POST.
        body: sent as JSON.
        read: from an event's data to a value; ValueError where it is no such event.
        is_last: whether a stream may end after this value; `[DONE]` ends every stream.
    """

    path: str
    body: Mapping[str, Any]
    read: Callable[[str], Chunk]
    is_last: Callable[[Chunk], bool] = lambda _: False


@cache
def json_reader(kind: Any) -> Callable[[bytes | str], Any]:
    """How a value of a type is read from JSON: unknown fields are ignored, whatever the type says of them.

    Args:
        kind: a pydantic model, or a union of them.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    return lambda text: adapter.validate_json(text, extra="ignore")


def generate(fields: GenerateFields) -> Call[GenerateResponse]:
    """Text after a prompt, in the server's own shape."""
    return Call("POST", "/generate", fields, json_reader(GenerateResponse))


def stream_generate(fields: GenerateFields) -> StreamCall[GenerateChunk | GenerateResponse]:
    """The same, as it comes; the last chunk is a `GenerateResponse`."""
    return StreamCall(
        "/generate",
        {**fields, "stream": True},
        json_reader(GenerateResponse | GenerateChunk),
        lambda chunk: isinstance(chunk, GenerateResponse),
    )


def complete(fields: CompletionFields) -> Call[CompletionResponse]:
    """Text after a prompt, in OpenAI's shape."""
    return Call("POST", "/v1/completions", fields, json_reader(CompletionResponse))


def stream_complete(fields: StreamedCompletionFields) -> StreamCall[CompletionResponse]:
    """The same, as it comes."""
    return StreamCall("/v1/completions", {**fields, "stream": True}, json_reader(CompletionResponse))


def chat(fields: ChatFields) -> Call[ChatResponse]:
    """The answer to a conversation."""
    return Call("POST", "/v1/chat/completions", fields, json_reader(ChatResponse))


def stream_chat(fields: StreamedChatFields) -> StreamCall[ChatChunk]:
    """The same, as it comes."""
    return StreamCall("/v1/chat/completions", {**fields, "stream": True}, json_reader(ChatChunk))


def plan(fields: PlanFields) -> Call[PlanResponse]:
    """The plan that a request would get."""
    return Call("POST", "/v1/rope/plan", fields, json_reader(PlanResponse))


def tokenize(fields: TokenizeFields) -> Call[TokenizeResponse]:
    """The token ids of a text or a conversation."""
    return Call("POST", "/tokenize", fields, json_reader(TokenizeResponse))


def detokenize(tokens: list[int]) -> Call[DetokenizeResponse]:
    """The text of token ids."""
    return Call("POST", "/detokenize", {"tokens": tokens}, json_reader(DetokenizeResponse))


def models() -> Call[ModelList]:
    """What is served."""
    return Call("GET", "/v1/models", None, json_reader(ModelList))


def model(name: str) -> Call[ModelCard]:
    """The served model, by its name."""
    return Call("GET", f"/v1/models/{quote(name, safe='')}", None, json_reader(ModelCard))


def health() -> Call[Status]:
    """Not retried: a probe tells what is now."""
    return Call("GET", "/health", None, json_reader(Status), is_retried=False)


def ready() -> Call[Status]:
    """Not retried: a probe tells what is now."""
    return Call("GET", "/ready", None, json_reader(Status), is_retried=False)


def metrics() -> Call[str]:
    """Metrics, in Prometheus' text format."""
    return Call("GET", "/metrics", None, lambda body: body.decode())
