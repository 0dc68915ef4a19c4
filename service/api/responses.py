"""What clients get: the fields of every answer. Knows JSON shapes; does not know how they come about."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Value = TypeVar("Value")
Omitted = Annotated[Value | None, Field(exclude_if=lambda value: value is None)]
"""A field of an answer that is left out where it has nothing to say."""


class RopeInfo(BaseModel):
    """The positional plan that a request ended under."""

    scheme: str
    mode: str
    factor: float
    growth: str
    prefix_reuse: str = Field(description="whose cached prefixes it could use")
    reason: str
    rerotations: int = Field(description="how often the cached keys were moved to another plan")
    other_plan_prefix_tokens: int = Field(
        description="of the cached tokens, those computed or rotated under another plan"
    )
    native_length: int = Field(description="tokens the model was trained to use")
    plan_max_length: int = Field(description="tokens that this plan covers")


class PromptTokensDetails(BaseModel):
    """What became of a prompt's tokens."""

    cached_tokens: int = Field(description="tokens that were found in the cache")


class Usage(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TimingInfo(BaseModel):
    """Where a request spent its time, in seconds."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float


class TopToken(BaseModel):
    """One of the likeliest tokens."""

    token_id: int
    token: str
    logprob: float


class TokenLogprob(TopToken):
    """A token with its log-probability, and the likeliest tokens in its place."""

    top: list[TopToken]


PromptLogprobs = Omitted[list[TokenLogprob | None]]
"""Of a prompt's tokens; the first, which follows nothing, has none."""


class GenerateResponse(BaseModel):
    """Answer of POST /generate; in a stream, the last event, with the rest of the text and of the tokens."""

    id: str
    model: str
    text: str
    token_ids: list[int]
    logprobs: Omitted[list[TokenLogprob]] = None
    prompt_logprobs: PromptLogprobs = None
    finish_reason: str
    usage: Usage
    rope: RopeInfo
    timing: TimingInfo


class GenerateChunk(BaseModel):
    """An event of POST /generate before the last."""

    id: str
    text: str
    token_ids: list[int]
    logprobs: Omitted[list[TokenLogprob]] = None
    prompt_logprobs: PromptLogprobs = None
    finish_reason: None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a text's tokens; each list has one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for a prompt's first token, which follows nothing")
    top_logprobs: list[dict[str, float] | None] = Field(description="the likeliest tokens, and the token itself")
    text_offset: list[int] = Field(description="characters of the text that were complete before the token")


class CompletionChoice(BaseModel):
    """One text of a completion."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    rope: Omitted[RopeInfo] = Field(default=None, description="of this choice, where there are several")


class CompletionResponse(BaseModel):
    """Answer of POST /v1/completions; also the shape of each chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Omitted[Usage] = None
    rope: Omitted[RopeInfo] = None


class TopLogprob(BaseModel):
    """One of the likeliest tokens of a chat."""

    token: str
    logprob: float
    bytes: list[int] = Field(description="those of the token, which can be a part of a character")


class ChatTokenLogprob(TopLogprob):
    """A token of a chat with its log-probability, and the likeliest tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message's tokens."""

    content: list[ChatTokenLogprob]


class CalledFunctionInfo(BaseModel):
    """The function that the model calls."""

    name: str
    arguments: str = Field(description="JSON")


class ToolCallInfo(BaseModel):
    """A tool call that the model wrote; in a stream it comes whole, in one chunk."""

    index: Omitted[int] = Field(default=None, description="in streams only")
    id: str
    type: Literal["function"] = "function"
    function: CalledFunctionInfo


class ChatAnswer(BaseModel):
    """The message that the model wrote."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="null where there is none beside tool calls")
    reasoning_content: Omitted[str] = Field(
        default=None, description="what stood between the model's marks of thinking"
    )
    tool_calls: Omitted[list[ToolCallInfo]] = None
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer of a chat."""

    index: int = 0
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    rope: Omitted[RopeInfo] = Field(default=None, description="of this choice, where there are several")


class ChatResponse(BaseModel):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    rope: RopeInfo


class ChatDelta(BaseModel):
    """What a chunk adds to the message."""

    role: Omitted[Literal["assistant"]] = None
    content: Omitted[str] = None
    reasoning_content: Omitted[str] = None
    tool_calls: Omitted[list[ToolCallInfo]] = None


class ChatChunkChoice(BaseModel):
    """One answer's part of a chunk."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    """One chunk of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Omitted[Usage] = None
    rope: Omitted[RopeInfo] = None


class TokenizeResponse(BaseModel):
    """Answer of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(BaseModel):
    """Answer of POST /detokenize."""

    prompt: str


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ropewalk"
    max_model_len: int
    native_length: int
    rope_schemes: list[str]
    rope_factors: list[float]


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class RungInfo(BaseModel):
    """A scheme at a factor, and the tokens that it covers."""

    scheme: str
    factor: float
    max_length: int


class PairInfo(BaseModel):
    """A pair of rotated dimensions, unscaled and under the plan."""

    wavelength: float = Field(description="tokens in which it turns once, unscaled")
    rotations: float = Field(description="its turns in the length that it was trained on, unscaled")
    plan_wavelength: float = Field(description="tokens in which it turns once under the plan")
    kind: str = Field(
        description="kept: as unscaled; interpolated: slowed down by the factor or more; blended: between; "
        "divided by ...: by a number of its own"
    )


class PlanResponse(BaseModel):
    """Answer of POST /v1/rope/plan, and what `ropewalk plan --json` prints."""

    model_config = ConfigDict(extra="forbid")

    scheme: str
    mode: str
    factor: float
    growth: str
    prefix_reuse: str
    reason: str
    prompt_tokens: int
    max_tokens: int
    native_length: int
    max_length: int
    plan_max_length: int
    attention_factor: float
    inv_freq: list[float]
    rungs: list[RungInfo] = Field(description="the plan that it starts under, then those that it grows through")
    ladder: list[RungInfo] = Field(description="the server's rungs")
    local: dict[str, Any] | None = Field(description="the rotation of layers with a window, where they have their own")
    pairs: list[PairInfo] = Field(description="each pair of dimensions, fastest first")


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """An error, in the shape that OpenAI's clients expect."""

    error: ErrorBody
