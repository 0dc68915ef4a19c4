"""What conversations are made of, as types. What each field means, and its limits, is in `service.api.requests`."""

from typing import Any, Literal, Required, TypedDict


class TextPartFields(TypedDict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class CalledFunctionFields(TypedDict, total=False):
    """The function that a tool call calls."""

    name: Required[str]
    arguments: Required[str]
    parsed_arguments: Any


class ToolCallFields(TypedDict, total=False):
    """A tool call of an earlier answer."""

    id: Required[str]
    type: Required[Literal["function"]]
    function: Required[CalledFunctionFields]
    index: int | None


class MessageFields(TypedDict, total=False):
    """One message of a conversation."""

    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: str | list[TextPartFields] | None
    name: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCallFields] | None
    tool_call_id: str | None
    refusal: str | None
    annotations: list[Any] | None
    audio: None
    function_call: None
    parsed: Any


class FunctionFields(TypedDict, total=False):
    """A function that the model may call."""

    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ToolFields(TypedDict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionFields


class FunctionNameFields(TypedDict):
    """A function by its name."""

    name: str


class NamedToolFields(TypedDict):
    """The tool that the model has to use."""

    type: Literal["function"]
    function: FunctionNameFields


class TemplateFields(TypedDict, total=False):
    """What a chat template takes beside the messages."""

    tools: list[ToolFields] | None
    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None
