"""What clients send: the fields of every request, and their limits. Does not know what becomes of a request.

Unknown fields are refused. `user` is the one field that is accepted and does nothing.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from service.scaling.wish import Growth, Mode, PrefixReuse

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_COUNT = 2**63 - 1  # any larger number is no count of tokens; Python writes only so many digits in a message

Probability = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(le=MAX_COUNT)]


def _encodable(text: str) -> str:
    """Refuse halves of surrogate pairs, which JSON can carry and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair") from None
    return text


Encodable = AfterValidator(_encodable)
Text = Annotated[str, Encodable]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Neutral = Annotated[float, Field(ge=0, le=0)] | None
Prompt = Annotated[str, Field(min_length=1), Encodable] | TokenIds
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), Encodable]


class RequestModel(BaseModel):
    """A request body, or a part of one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RopeWishFields(RequestModel):
    """The positional plan that a request asks for; what is left out is the server's choice."""

    scheme: Text | None = Field(None, description="a scaling scheme, as GET /v1/models lists them")
    mode: Mode | None = Field(None, description="how the plan covers the request")
    factor: float | None = Field(None, ge=1, allow_inf_nan=False, description="a factor of the server's ladder")
    growth: Growth | None = Field(None, description="what happens when the plan is outgrown")
    prefix_reuse: PrefixReuse | None = Field(None, description="whose cached prefixes the request may use")


class SamplingFields(RequestModel):
    """What all three generating routes take."""

    model: Text | None = Field(None, description="must be the served model's name where given")
    max_tokens: Count | None = Field(None, ge=1, description="default: all that remains below the maximum length")
    min_tokens: Count | None = Field(None, ge=0, description="no end token or stop string counts before so many tokens")
    temperature: Probability | None = Field(None, ge=0, le=2, description="0 is greedy; default: the model's, else 1")
    top_p: Probability | None = Field(None, gt=0, le=1, description="default: the model's, else 1")
    top_k: Count | None = Field(None, ge=0, description="0 keeps all; default: the model's, else 0")
    min_p: Probability | None = Field(None, ge=0, le=1, description="default: the model's, else 0")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="makes sampling repeatable")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="strings that end the text; they are not part of it"
    )
    ignore_eos: bool | None = Field(None, description="generate on past the model's end tokens")
    n: Literal[1] | None = Field(None, description="only 1 is supported")
    presence_penalty: Neutral = Field(None, description="only 0 is supported")
    frequency_penalty: Neutral = Field(None, description="only 0 is supported")
    stream: bool | None = Field(None, description="send the answer as server-sent events")
    rope: RopeWishFields | None = Field(None, description="the positional plan that the request asks for")
    user: Text | None = Field(None, description="accepted and not used")


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="send one more chunk, with the usage, at the end")


class GenerateRequest(SamplingFields):
    """Body of POST /generate."""

    prompt: Prompt = Field(description="text, or token ids")


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Prompt = Field(description="text, or token ids")
    stream_options: StreamOptions | None = None


class TextPart(RequestModel):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class ChatMessage(RequestModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer is system by another name")
    content: Text | list[TextPart] = Field(description="text, or pieces of text, which are joined")

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Count | None = Field(None, ge=1, description="the newer name of max_tokens")
    logprobs: Literal[False] | None = Field(None, description="only false is supported")
    stream_options: StreamOptions | None = None


class PlanRequest(RequestModel):
    """Body of POST /v1/rope/plan: a prompt, a conversation, or only the prompt's length."""

    prompt: Prompt | None = Field(None, description="text, or token ids")
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = Field(None, description="as in a chat")
    prompt_tokens: Count | None = Field(None, ge=1, description="the prompt's length, instead of the prompt")
    max_tokens: Count | None = Field(None, ge=1, description="default: all that remains below the maximum length")
    rope: RopeWishFields | None = None


class TokenizeRequest(RequestModel):
    """Body of POST /tokenize."""

    prompt: Text
    add_special_tokens: bool = Field(True, description="add what the model's tokenizer puts around a text")


class DetokenizeRequest(RequestModel):
    """Body of POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0)]]


FIELD_NAMES = frozenset(
    name
    for model in (GenerateRequest, CompletionRequest, ChatRequest, PlanRequest, TokenizeRequest, DetokenizeRequest)
    for part in (model, RopeWishFields, StreamOptions, ChatMessage, TextPart)
    for name in part.model_fields
)
"""Every field that a request can have."""
