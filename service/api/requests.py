"""What clients send: the fields of every request, and their limits. Does not know what becomes of a request.

Unknown fields are refused; those of `ToleratedFields` are accepted and do nothing. What an operator can limit further
is in `service.api.limits`.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from service.scaling.wish import Growth, Mode, PrefixReuse

MAX_BIASES = 1024
MAX_STOP_TOKENS = 1024
MAX_TOOLS = 1024
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
Prompts = Prompt | Annotated[list[Prompt], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1), Encodable]


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

    type: Literal["text", "json_object", "json_schema"] = Field(description="what it is")
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
    stop: StopString | list[StopString] | None = Field(
        None, description="strings that end the text; they are not part of it"
    )
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKENS)] | None = Field(
        None, description="tokens that end the text, beside the model's own"
    )
    ignore_eos: bool | None = Field(None, description="generate on past the model's end tokens")
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
    include_obfuscation: bool | None = Field(None, description="accepted and not used: nothing is added to chunks")


class ToleratedFields(RequestModel):
    """Fields of OpenAI's API that say nothing about the answer: accepted, and not used."""

    metadata: dict[str, Any] | None = Field(None, description="accepted and not used")
    store: bool | None = Field(None, description="accepted and not used: nothing is stored")
    service_tier: Text | None = Field(None, description="accepted and not used")
    safety_identifier: Text | None = Field(None, description="accepted and not used")
    prompt_cache_key: Text | None = Field(None, description="accepted and not used: prefixes are found by their tokens")
    prompt_cache_retention: Text | None = Field(None, description="accepted and not used")
    prediction: dict[str, Any] | None = Field(None, description="accepted and not used")


class OpenAIFields(SamplingFields, ToleratedFields):
    """What OpenAI's two generating routes take beside that."""

    n: Count | None = Field(None, ge=1, description="choices that are generated for each prompt; default: 1")
    stream_options: StreamOptions | None = Field(None, description="goes with stream: true")


class GenerateRequest(SamplingFields):
    """Body of POST /generate."""

    prompt: Prompt = Field(description="text, or token ids")
    n: Literal[1] | None = Field(None, description="only 1: the OpenAI routes give several choices")
    logprobs: Logprobs | None = Field(None, description="how many of the likeliest tokens are told beside each token")
    prompt_logprobs: Logprobs | None = Field(None, description="the same beside each token of the prompt")


class CompletionRequest(OpenAIFields):
    """Body of POST /v1/completions."""

    prompt: Prompts = Field(description="text, or token ids, or a list of such prompts")
    logprobs: Logprobs | None = Field(None, description="how many of the likeliest tokens are told beside each token")
    echo: bool | None = Field(None, description="the text begins with the prompt, and logprobs with its tokens")
    best_of: Count | None = Field(None, description="accepted if it is n: texts are not ranked here")
    suffix: None = Field(None, description="not supported")


class TextPart(RequestModel):
    """A piece of a message."""

    type: Literal["text"] = Field(description="text, the only kind")
    text: Text = Field(description="joined to what stands before and after")


class CalledFunction(RequestModel):
    """The function that a tool call calls."""

    name: Text = Field(description="of the function")
    arguments: Text = Field(description="JSON")
    parsed_arguments: Any = Field(None, description="accepted and not used: OpenAI's client adds it")


class ToolCall(RequestModel):
    """A tool call of an earlier answer."""

    id: Text = Field(description="as the answer had it")
    type: Literal["function"] = Field(description="function, the only kind")
    function: CalledFunction = Field(description="what was called, and with what")
    index: int | None = Field(None, description="accepted and not used")


class ChatMessage(RequestModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="whose message it is")
    content: Text | list[TextPart] | None = Field(None, description="text, or pieces of text, which are joined")
    name: Text | None = Field(None, description="of the participant, for templates that read it")
    reasoning_content: Text | None = Field(None, description="of an earlier answer, for templates that read it")
    tool_calls: list[ToolCall] | None = Field(None, description="of an earlier answer")
    tool_call_id: Text | None = Field(None, description="the call that a tool message answers")
    refusal: Text | None = Field(None, description="accepted and not used: answers have it")
    annotations: list[Any] | None = Field(None, description="accepted and not used")
    parsed: Any = Field(None, description="accepted and not used: OpenAI's client adds it")
    audio: None = Field(None, description="only null, as answers of other servers have it")
    function_call: None = Field(None, description="only null, likewise")


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")] = Field(description="what calls name it by")
    description: Text | None = Field(None, description="what it does, for the model")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments; none: it takes none")
    strict: bool | None = Field(None, description="accepted: a call that is asked for always follows the schema")


class Tool(RequestModel):
    """A tool that the model may use."""

    type: Literal["function"] = Field(description="function, the only kind")
    function: FunctionDefinition = Field(description="the function")


class FunctionName(RequestModel):
    """A function by its name."""

    name: Text = Field(description="of one of the tools")


class NamedTool(RequestModel):
    """The tool that the model has to use."""

    type: Literal["function"] = Field(description="function, the only kind")
    function: FunctionName = Field(description="the function that has to be called")


Messages = Annotated[list[ChatMessage], Field(min_length=1)]


class TemplateFields(RequestModel):
    """What a chat template takes beside the messages."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="for models whose chat template knows tools"
    )
    chat_template_kwargs: dict[Text, Any] | None = Field(
        None, description="values for the model's chat template, as enable_thinking"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="for models whose chat template reads it"
    )


class ChatRequest(TemplateFields, OpenAIFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages = Field(description="the conversation so far")
    max_completion_tokens: Count | None = Field(None, ge=1, description="the newer name of max_tokens")
    logprobs: bool | None = Field(None, description="tell each token's log-probability")
    top_logprobs: Logprobs | None = Field(None, description="beside it so many likeliest tokens; goes with logprobs")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="whether the model has to call a tool, or which; default: auto with tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call; default: true")
    modalities: list[Literal["text"]] | None = Field(None, description="only text")

    @property
    def told_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []


class PlanRequest(TemplateFields):
    """Body of POST /v1/rope/plan: a prompt, a conversation, or only the prompt's length."""

    prompt: Prompt | None = Field(None, description="text, or token ids")
    messages: Messages | None = Field(None, description="as in a chat")
    prompt_tokens: Count | None = Field(None, ge=1, description="the prompt's length, instead of the prompt")
    max_tokens: Count | None = Field(None, ge=1, description="default: all that remains below the maximum length")
    rope: RopeWishFields | None = Field(None, description="the positional plan that the request asks for")


class TokenizeRequest(TemplateFields):
    """Body of POST /tokenize: a text or a conversation."""

    prompt: Text | None = Field(None, description="a text")
    messages: Messages | None = Field(None, description="as in a chat")
    add_special_tokens: bool = Field(
        True, description="add what the model's tokenizer puts around a text; the chat template puts its own"
    )


class DetokenizeRequest(RequestModel):
    """Body of POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0)]] = Field(description="token ids")


PARTS = (
    *(RopeWishFields, StreamOptions, ResponseFormat, JsonSchema, StructuredOutputs),
    *(ChatMessage, TextPart, ToolCall, CalledFunction, Tool, FunctionDefinition, NamedTool, FunctionName),
)

FIELD_NAMES = frozenset(
    field.alias or name
    for model in (GenerateRequest, CompletionRequest, ChatRequest, PlanRequest, TokenizeRequest, DetokenizeRequest)
    for part in (model, *PARTS)
    for name, field in part.model_fields.items()
)
"""Every field that a request can have."""
