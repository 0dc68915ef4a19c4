"""The shapes of POST /v1/chat/completions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from service import core
from service.api.answers.base import AnswerFormat, Ending, Header, usage
from service.api.logprobs import LogprobShapes
from service.api.responses import (
    CalledFunctionInfo,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatResponse,
    ToolCallInfo,
)
from service.chat.splitter import Content, Part, Reasoning, Splitter, ToolCall


@dataclass
class _Message:
    """One choice's message, as far as it has come."""

    splitter: Splitter
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCallInfo] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> list[ChatDelta]:
        """Keep some parts.

        Returns:
            What each adds to the message.
        """
        return [self._add(part) for part in parts]

    def _add(self, part: Part) -> ChatDelta:
        match part:
            case Content(text):
                self.content.append(text)
                return ChatDelta(content=text)
            case Reasoning(text):
                self.reasoning.append(text)
                return ChatDelta(reasoning_content=text)
            case ToolCall():
                call = ToolCallInfo(id=part.id, function=CalledFunctionInfo(name=part.name, arguments=part.arguments))
                self.tool_calls.append(call)
                return ChatDelta(tool_calls=[call.model_copy(update={"index": part.index})])

    def finish_reason(self, event: core.FinishEvent) -> str:
        """Why the message ended, as OpenAI names it."""
        return "tool_calls" if self.tool_calls and event.reason == core.FinishReason.STOP else event.reason

    def answer(self) -> ChatAnswer:
        """The message as a whole."""
        content = "".join(self.content)
        return ChatAnswer(
            content=None if self.tool_calls and not content else content,
            reasoning_content="".join(self.reasoning) or None,
            tool_calls=self.tool_calls or None,
        )


class ChatFormat(AnswerFormat):
    """OpenAI's shape of a chat: each choice's text is split into content, reasoning and tool calls."""

    closing = "[DONE]"

    def __init__(
        self, new_splitter: Callable[[], Splitter], logprobs: LogprobShapes | None, *, include_usage: bool, choices: int
    ) -> None:
        """
        Args:
            new_splitter: splits the text of one choice.
            logprobs: shapes log-probabilities; None where none are asked for.
            include_usage: whether a stream ends with one more chunk, the usage.
            choices: how many there are.
        """
        self._messages = [_Message(new_splitter()) for _ in range(choices)]
        self._shapes = logprobs
        self._include_usage = include_usage

    def begin(self, header: Header) -> Iterable[BaseModel]:
        for index in range(header.num_choices):
            yield self._chunk(header, index, ChatDelta(role="assistant", content=""))

    def token(self, header: Header, index: int, token: core.TokenEvent) -> Iterable[BaseModel]:
        deltas = self._feed(index, token.text)
        logprobs = None if self._shapes is None else self._shapes.chat([token])
        if logprobs is not None and not deltas:
            deltas = [ChatDelta(content="")]
        for place, delta in enumerate(deltas):
            yield self._chunk(header, index, delta, logprobs=logprobs if place == 0 else None)

    def keep(self, index: int, token: core.TokenEvent) -> None:
        self._feed(index, token.text)

    def is_complete(self, index: int) -> bool:
        return self._messages[index].splitter.done

    def end(self, ending: Ending) -> Iterable[BaseModel]:
        header, index = ending.header, ending.index
        for delta in self._finish(ending):
            yield self._chunk(header, index, delta)
        reason = self._messages[index].finish_reason(ending.event)
        last = self._chunk(header, index, ChatDelta(), finish_reason=reason)
        yield last.model_copy(update={"rope": ending.rope})

    def close(self, endings: Sequence[Ending]) -> Iterable[BaseModel]:
        if self._include_usage:
            header = endings[0].header
            yield ChatChunk(
                id=header.id,
                created=header.created,
                model=header.model,
                choices=[],
                usage=usage(endings),
                rope=endings[0].rope,
            )

    def whole(self, endings: Sequence[Ending]) -> BaseModel:
        header = endings[0].header
        return ChatResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=[self._choice(ending) for ending in endings],
            usage=usage(endings),
            rope=endings[0].rope,
        )

    def _choice(self, ending: Ending) -> ChatChoice:
        self._finish(ending)
        message = self._messages[ending.index]
        return ChatChoice(
            index=ending.index,
            message=message.answer(),
            logprobs=None if self._shapes is None else self._shapes.chat(ending.tokens),
            finish_reason=message.finish_reason(ending.event),
            rope=ending.rope_if_several,
        )

    def _feed(self, index: int, text: str) -> list[ChatDelta]:
        message = self._messages[index]
        return message.add(message.splitter.feed(text))

    def _finish(self, ending: Ending) -> list[ChatDelta]:
        """Take the text that the end itself brought, and what the splitter held back."""
        splitter = self._messages[ending.index].splitter
        return self._messages[ending.index].add([*splitter.feed(ending.event.text), *splitter.end()])

    def _chunk(
        self,
        header: Header,
        index: int,
        delta: ChatDelta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return ChatChunk(id=header.id, created=header.created, model=header.model, choices=[choice])
