"""From a chat request's fields to its prompt, its constraint and the shapes of its answer.

Knows fields and the text side of chats (`service.chat`); does not know how requests are admitted.
"""

import asyncio
from typing import Any

from service.api.admission import tokenize
from service.api.answers.chat import ChatFormat
from service.api.constraints import Constraint, constraint_of
from service.api.logprobs import LogprobShapes
from service.api.requests import ChatMessage, ChatRequest, NamedTool, TemplateFields
from service.api.state import Server
from service.chat.forcing import forced_calls
from service.chat.functions import functions_of
from service.chat.special_tokens import special_markers
from service.chat.splitter import Splitter, Tools
from service.chat.template import ChatTemplate
from service.errors import RequestError


class Chat:
    """One chat request on its way to an answer."""

    def __init__(self, server: Server, body: ChatRequest) -> None:
        """Check what can be checked before any work is done.

        Raises:
            RequestError: the model takes no chats or no tools, or fields contradict each other.
        """
        loaded = server.require_loaded()
        self._server, self._body, self._template = server, body, loaded.chat_template
        self._tokenizer = loaded.tokenizer.backend_tokenizer
        self._forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
        self._written = constraint_of(body)
        self._tools: Tools | None = None
        self._reasoning = None if self._written else self._template.reasoning
        self._begins_inside = False
        if body.told_tools:
            if self._written is not None:
                param = self._written.param.split(".")[0]
                raise RequestError(f"{param}: goes with tools only where tool_choice is none", param=param)
            tools = [tool.model_dump(exclude_none=True) for tool in body.told_tools]
            self._tools = Tools(
                self._template.require_tool_format(), functions_of(tools), body.parallel_tool_calls is False
            )
        elif self._forced:
            raise RequestError("tool_choice: there are no tools to call", param="tool_choice")

    @property
    def visible_tokens(self) -> frozenset[int]:
        """Special tokens that are part of the text, since they mark calls or reasoning."""
        tool_format = None if self._tools is None else self._tools.format
        return frozenset(special_markers(self._tokenizer, tool_format, self._reasoning).values())

    async def read_prompts(self) -> list[list[int]]:
        """The conversation as one prompt."""
        text = await render(self._template, self._body.messages, self._body, tells_tools=self._tools is not None)
        self._begins_inside = self._reasoning is not None and self._reasoning.opened_by(text)
        return [await tokenize(self._server, text, add_special_tokens=False)]

    def constraint(self) -> Constraint | None:
        """What the text must match; to be called when the prompt has been read, for it may end inside reasoning."""
        if self._tools is None or not self._forced:
            return self._written
        only = self._body.tool_choice.function.name if isinstance(self._body.tool_choice, NamedTool) else None
        spec = forced_calls(
            self._tokenizer,
            self._tools.format,
            self._tools.functions,
            only=only,
            parallel=only is None and not self._tools.first_call_only,
            reasoning=self._reasoning,
            inside_reasoning=self._begins_inside,
        )
        return Constraint(spec, "tool_choice")

    def answer(self, logprobs: LogprobShapes | None, *, include_usage: bool) -> ChatFormat:
        """The shapes of the answer."""

        def new_splitter() -> Splitter:
            return Splitter(tools=self._tools, reasoning=self._reasoning, inside_reasoning=self._begins_inside)

        return ChatFormat(new_splitter, logprobs, include_usage=include_usage, choices=self._body.n or 1)


async def render(
    template: ChatTemplate, messages: list[ChatMessage], fields: TemplateFields, *, tells_tools: bool = True
) -> str:
    """A conversation as the model's chat template writes it, off the event loop: templates are programs.

    Args:
        template: the model's.
        messages: the conversation.
        fields: what else the template is given.
        tells_tools: whether the tools are among that.

    Raises:
        RequestError: a message lacks what its role needs, or the template refuses something.
    """
    for number, message in enumerate(messages):
        _check(message, f"messages.{number}")
    variables = _variables(template, fields)
    tools = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()] if tells_tools else []
    if tools:
        template.require_tool_format()
    shaped = [message.model_dump(exclude_none=True, exclude=UNUSED) for message in messages]
    return await asyncio.to_thread(template.render, shaped, tools, variables)


UNUSED: Any = {
    **dict.fromkeys(("refusal", "annotations", "parsed"), True),
    "tool_calls": {"__all__": {"index": True, "function": {"parsed_arguments"}}},
}


def _check(message: ChatMessage, place: str) -> None:
    """Refuse a message that lacks what its role needs, or has what goes with another."""
    if message.tool_calls is not None and message.role != "assistant":
        param = f"{place}.tool_calls"
        raise RequestError(f"{param}: goes only with role assistant, the role is {message.role}", param=param)
    if (message.tool_call_id is not None) != (message.role == "tool"):
        param = f"{place}.tool_call_id"
        raise RequestError(f"{param}: goes with role tool, and only with it; the role is {message.role}", param=param)
    if message.content is None and not message.tool_calls:
        param = f"{place}.content"
        raise RequestError(f"{param} is missing: only an assistant's tool_calls go without it", param=param)


def _variables(template: ChatTemplate, fields: TemplateFields) -> dict[str, Any]:
    variables = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        if not template.knows("reasoning_effort"):
            raise RequestError("reasoning_effort: the model's chat template does not read it", param="reasoning_effort")
        variables["reasoning_effort"] = fields.reasoning_effort
    return variables


def max_tokens_of(body: ChatRequest) -> int | None:
    """What a chat asks for, under either name.

    Raises:
        RequestError: it gives two numbers.
    """
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}: give one",
            param="max_completion_tokens",
        )
    return body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
