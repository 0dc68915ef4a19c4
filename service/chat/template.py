"""A model's chat template: what it writes, and what its text tells of the model. Knows transformers and Jinja.

A template is a program that comes with the model, and the operator who chose the model chose it too. transformers runs
it in Jinja's sandbox, which keeps it from files, from Python's internals and from changing what it is given, and limits
`range`. Nothing limits its time and memory: a template that loops in itself for ever, or multiplies a string into
gigabytes, holds up the thread that renders, or the process. Render in a worker thread.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerFast

from service.chat.formats import FORMATS, ToolFormat, format_of
from service.chat.messages import for_template, has_calls
from service.chat.reasoning import ReasoningMarkers, reasoning_of
from service.errors import RequestError

PROBE_NAME = "probe_function_7f3a"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "A value."}},
            "required": ["value"],
        },
    },
}

PROBE_CALL_NAME = "probe_call_51d8"
PROBE_CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "probe0001", "type": "function", "function": {"name": PROBE_CALL_NAME, "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "probe0001", "content": "1"},
]

# What is said otherwise, or would choose another template.
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) | {"messages"}


class ChatTemplate:
    """The template of one tokenizer, looked at once.

    Attributes:
        knows_tools: whether it tells the model of the tools that it is given.
        leaves_calls_out: whether it reads past the calls of earlier messages, as some do that know tools.
        tool_format: how the model writes calls, None where the template shows no format that is known here.
        reasoning: what stands around the model's reasoning, None where the template shows nothing of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Look at a tokenizer's template, or templates: of several, the one for tools is taken where there are tools,
        as transformers does. A tokenizer without any is no error until something is to be rendered."""
        self._tokenizer = tokenizer
        template = tokenizer.chat_template or {}
        texts = {"default": template} if isinstance(template, str) else template
        self._text = "\n".join(texts.values())
        self._names = frozenset(name for text in texts.values() for name in _variables(text))
        self.knows_tools = self._tells_of_tools()
        self.tool_format = format_of(texts.get("tool_use", texts.get("default", ""))) if self.knows_tools else None
        self.leaves_calls_out = self.knows_tools and not self._writes_calls()
        self.reasoning: ReasoningMarkers | None = reasoning_of(self._text)

    def knows(self, name: str) -> bool:
        """Whether the template reads a variable of this name."""
        return name in self._names

    def require_tool_format(self) -> ToolFormat:
        """How the model writes calls.

        Raises:
            RequestError: the model takes no tools, or its calls cannot be read.
        """
        if not self.knows_tools:
            raise RequestError("tools: the model's chat template takes none", param="tools")
        if self.tool_format is None:
            known = ", ".join(FORMATS)
            message = f"tools: the model's chat template writes calls in a format that is not known here ({known} are)"
            raise RequestError(message, param="tools")
        return self.tool_format

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for the conversation's next message.

        Args:
            messages: as OpenAI's clients send them; see `for_template`.
            tools: the same; None or none of them for no tools.
            variables: what else the template is given, as `chat_template_kwargs` has it.

        Raises:
            RequestError: there is no template, or it refuses the messages; it does not read a variable, or not from
                outside; or the messages or tools have what cannot be written.
        """
        if has_calls(messages) and not self.knows_tools:
            raise RequestError("messages: the model's chat template knows no tool calls", param="messages")
        if has_calls(messages) and self.leaves_calls_out:
            raise RequestError("messages: the model's chat template leaves tool calls out", param="messages")
        for name in variables or {}:
            if name in RESERVED or not self.knows(name):
                message = f"chat_template_kwargs: the model's chat template takes no {name}"
                raise RequestError(message, param="chat_template_kwargs")
        short_ids = self.tool_format is not None and self.tool_format.short_ids
        keep_developer = "developer" in self._text
        rewritten = for_template(messages, keep_developer=keep_developer, short_ids=short_ids)
        return self._apply(rewritten, [*tools] if tools else None, variables or {})

    def _apply(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[Any, Any] | Callable[..., Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        if not self._tokenizer.chat_template:
            message = "messages: the model has no chat template: use /v1/completions, or start with --chat-template"
            raise RequestError(message, param="messages")
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **variables
            )
        except Exception as error:  # a template is the model's own little program and can fail in any way
            reason = str(error) or type(error).__name__
            message = f"messages: the model's chat template refuses them: {reason}"
            raise RequestError(message, param="messages") from error
        assert isinstance(text, str)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON in arguments and tools can carry it past other checks
            message = "messages: the conversation or its tools have half of a surrogate pair"
            raise RequestError(message, param="messages") from error
        return text

    def _tells_of_tools(self) -> bool:
        try:
            return PROBE_NAME in self._apply([{"role": "user", "content": "Hello"}], [PROBE_TOOL], {})
        except RequestError:
            return False

    def _writes_calls(self) -> bool:
        """Also where it refuses the probe: it then says why when it is given such messages."""
        try:
            return PROBE_CALL_NAME in self._apply(for_template(PROBE_CALL), None, {})
        except RequestError:
            return True


class _Generation(Extension):
    """transformers' `{% generation %}` blocks, which mark what the model wrote, as what they contain."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _variables(template: str) -> set[str]:
    """Names that a template reads and that are not its own."""
    environment = Environment(extensions=[loopcontrols, _Generation])
    try:
        return meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:  # rendering will say so
        return set()
