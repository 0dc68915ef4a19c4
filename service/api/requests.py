"""What clients send: the fields of every request, and their limits. Does not know what becomes of a request.

Unknown fields are refused. `user` is the one field that is accepted and does nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from service.scaling.wish import Growth, Mode, PrefixReuse

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
MAX_CHOICES = 1024
MAX_LOGPROBS = 20
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
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=False)]  # JSON writes keys as strings
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
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


class JsonSchema(RequestModel):
    """A JSON schema with a name."""

    name: Text = Field(description="not used")
    description: Text | None = Field(None, description="not used")
    schema_: dict[str, Any] = Field(alias="schema", description="properties come in its order")
    strict: bool | None = Field(None, description="the schema holds either way")


class ResponseFormat(RequestModel):
    """What the text is to be, as OpenAI's clients say it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, description="goes with type json_schema")


class StructuredOutputs(RequestModel):
    """What the text must match, as vLLM's clients say it: one of these."""

    json_: dict[str, Any] | None = Field(None, alias="json", description="a JSON schema")
    regex: Text | None = Field(None, description="a regular expression in Rust's syntax, for all of the text")
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        None, description="strings, of which the text is one"
    )
    grammar: Text | None = Field(None, description="a grammar in Lark's notation, or in EBNF as llama.cpp has it")


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
    presence_penalty: Penalty | None = Field(None, description="off the logit of every token generated before")
    frequency_penalty: Penalty | None = Field(None, description="the same, each time that it was generated")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="divides logits of tokens seen before; default: the model's, else 1"
    )
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASES)] | None = Field(
        None, description="token id to what is added to its logit"
    )
    response_format: ResponseFormat | None = Field(None, description="text, any JSON object, or what a schema accepts")
    structured_outputs: StructuredOutputs | None = Field(None, description="what the text must match")
    stream: bool | None = Field(None, description="send the answer as server-sent events")
    timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds that the request may take, queue included"
    )
    rope: RopeWishFields | None = Field(None, description="the positional plan that the request asks for")
    user: Text | None = Field(None, description="accepted and not used")


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="send one more chunk, with the usage, at the end")


class GenerateRequest(SamplingFields):
    """Body of POST /generate."""

    prompt: Prompt = Field(description="text, or token ids")
    logprobs: Logprobs | None = Field(None, description="how many of the likeliest tokens are told beside each token")


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Prompt = Field(description="text, or token ids")
    logprobs: Logprobs | None = Field(None, description="how many of the likeliest tokens are told beside each token")
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
    logprobs: bool | None = Field(None, description="tell each token's log-probability")
    top_logprobs: Logprobs | None = Field(None, description="beside it so many likeliest tokens; goes with logprobs")
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


PARTS = (RopeWishFields, StreamOptions, ChatMessage, TextPart, ResponseFormat, JsonSchema, StructuredOutputs)

FIELD_NAMES = frozenset(
    field.alias or name
    for model in (GenerateRequest, CompletionRequest, ChatRequest, PlanRequest, TokenizeRequest, DetokenizeRequest)
    for part in (model, *PARTS)
    for name, field in part.model_fields.items()
)
"""Every field that a request can have."""
