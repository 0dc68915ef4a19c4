"""What a call may say, field by field, as types. What each field means, and its limits, is in `service.api.requests`.

Nothing is checked here: the server that is asked knows best what it takes, and says so.
"""

from typing import Any, Literal, Required, TypedDict

from service.client.message_fields import MessageFields, NamedToolFields, TemplateFields
from service.scaling.wish import Growth, Mode, PrefixReuse


class RopeFields(TypedDict, total=False):
    """The positional plan that a request asks for."""

    scheme: str | None
    mode: Mode | None
    factor: float | None
    growth: Growth | None
    prefix_reuse: PrefixReuse | None


class JsonSchemaFields(TypedDict, total=False):
    """A JSON schema with a name."""

    name: Required[str]
    description: str | None
    schema: Required[dict[str, Any]]
    strict: bool | None


class ResponseFormatFields(TypedDict, total=False):
    """What the text is to be."""

    type: Required[Literal["text", "json_object", "json_schema"]]
    json_schema: JsonSchemaFields | None


class StructuredOutputsFields(TypedDict, total=False):
    """What the text must match: one of these."""

    json: dict[str, Any] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None


class StreamOptionsFields(TypedDict, total=False):
    """Options of a stream."""

    include_usage: bool | None
    include_obfuscation: bool | None


class SamplingFields(TypedDict, total=False):
    """What all three generating routes take."""

    model: str | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: dict[int, float] | None
    response_format: ResponseFormatFields | None
    structured_outputs: StructuredOutputsFields | None
    timeout: float | None
    rope: RopeFields | None
    user: str | None


class OpenAIFields(SamplingFields, total=False):
    """What OpenAI's two generating routes take beside that."""

    n: int | None
    metadata: dict[str, Any] | None
    store: bool | None
    service_tier: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    prediction: dict[str, Any] | None


class GenerateFields(SamplingFields, total=False):
    """Of POST /generate."""

    prompt: Required[str | list[int]]
    n: Literal[1] | None
    logprobs: int | None
    prompt_logprobs: int | None


class CompletionFields(OpenAIFields, total=False):
    """Of POST /v1/completions."""

    prompt: Required[str | list[int] | list[str] | list[list[int]] | list[str | list[int]]]
    logprobs: int | None
    echo: bool | None
    best_of: int | None
    suffix: None


class StreamedCompletionFields(CompletionFields, total=False):
    """Of POST /v1/completions, streamed."""

    stream_options: StreamOptionsFields | None


class ChatFields(OpenAIFields, TemplateFields, total=False):
    """Of POST /v1/chat/completions."""

    messages: Required[list[MessageFields]]
    max_completion_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    tool_choice: Literal["none", "auto", "required"] | NamedToolFields | None
    parallel_tool_calls: bool | None
    modalities: list[Literal["text"]] | None


class StreamedChatFields(ChatFields, total=False):
    """Of POST /v1/chat/completions, streamed."""

    stream_options: StreamOptionsFields | None


class PlanFields(TemplateFields, total=False):
    """Of POST /v1/rope/plan: one of prompt, messages and prompt_tokens."""

    prompt: str | list[int] | None
    messages: list[MessageFields] | None
    prompt_tokens: int | None
    max_tokens: int | None
    rope: RopeFields | None


class TokenizeFields(TemplateFields, total=False):
    """Of POST /tokenize: a prompt or messages."""

    prompt: str | None
    messages: list[MessageFields] | None
    add_special_tokens: bool
