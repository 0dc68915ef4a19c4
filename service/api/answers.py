"""The three shapes of an answer, streamed and whole. Knows wire formats; does not know where tokens come from."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import time
from typing import Protocol

from pydantic import BaseModel

from service import core
from service.api.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatResponse,
    CompletionChoice,
    CompletionResponse,
    GenerateChunk,
    GenerateResponse,
    PromptTokensDetails,
    RopeInfo,
    TimingInfo,
    Usage,
)


@dataclass(frozen=True)
class Header:
    """What every part of one answer begins with."""

    id: str
    model: str
    native_length: int
    created: int = field(default_factory=lambda: int(time()))


@dataclass(frozen=True)
class Ending:
    """How a request ended well.

    Attributes:
        text: for a whole answer all the text; in a stream what the end itself brought.
        sequence: the request.
        event: its terminal event.
        header: the answer's header.
    """

    text: str
    sequence: core.Sequence
    event: core.FinishEvent
    header: Header

    @property
    def usage(self) -> Usage:
        sequence = self.sequence
        prompt, completion = len(sequence.prompt), len(sequence.output)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sequence.num_prefix_tokens),
        )

    @property
    def rope(self) -> RopeInfo:
        sequence, choice = self.sequence, self.sequence.choice
        plan = sequence.history[-1].plan
        return RopeInfo(
            scheme=plan.scheme,
            mode=choice.mode,
            factor=plan.factor,
            growth=choice.growth,
            prefix_reuse=choice.prefix_reuse,
            reason=choice.reason,
            rerotations=sequence.num_rerotations,
            rerotated_prefix_tokens=sequence.num_rerotated_prefix_tokens,
            native_length=self.header.native_length,
            plan_max_length=plan.max_length,
        )

    @property
    def timing(self) -> TimingInfo:
        timing = self.event.timing
        return TimingInfo(
            queue_seconds=timing.queue,
            prefill_seconds=timing.prefill,
            decode_seconds=timing.decode,
            time_to_first_token_seconds=timing.first_token,
            total_seconds=timing.total,
        )


class AnswerFormat(Protocol):
    """One route's shapes."""

    closing: str | None
    """What ends a stream after its last event, None for nothing."""

    def begin(self, header: Header) -> Iterable[BaseModel]:
        """Events before the first token."""
        ...

    def token(self, header: Header, token_id: int, text: str) -> Iterable[BaseModel]:
        """Events of one more token."""
        ...

    def end(self, ending: Ending) -> Iterable[BaseModel]:
        """The last events."""
        ...

    def whole(self, ending: Ending) -> BaseModel:
        """The answer in one piece."""
        ...


class GenerateFormat:
    """POST /generate."""

    closing: str | None = None

    def begin(self, _: Header) -> Iterable[BaseModel]:
        return ()

    def token(self, header: Header, token_id: int, text: str) -> Iterable[BaseModel]:
        yield GenerateChunk(id=header.id, text=text, token_ids=[token_id])

    def end(self, ending: Ending) -> Iterable[BaseModel]:
        yield self._answer(ending, [])

    def whole(self, ending: Ending) -> BaseModel:
        return self._answer(ending, ending.sequence.output)

    def _answer(self, ending: Ending, token_ids: list[int]) -> GenerateResponse:
        return GenerateResponse(
            id=ending.header.id,
            model=ending.header.model,
            text=ending.text,
            token_ids=token_ids,
            finish_reason=ending.event.reason,
            usage=ending.usage,
            rope=ending.rope,
            timing=ending.timing,
        )


class CompletionFormat:
    """POST /v1/completions."""

    closing: str | None = "[DONE]"

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage

    def begin(self, _: Header) -> Iterable[BaseModel]:
        return ()

    def token(self, header: Header, _: int, text: str) -> Iterable[BaseModel]:
        if text:
            yield self._answer(header, [CompletionChoice(text=text, finish_reason=None)])

    def end(self, ending: Ending) -> Iterable[BaseModel]:
        last = self._answer(ending.header, [CompletionChoice(text=ending.text, finish_reason=ending.event.reason)])
        last.rope = ending.rope
        yield last
        if self._include_usage:
            yield self._answer(ending.header, []).model_copy(update={"usage": ending.usage, "rope": ending.rope})

    def whole(self, ending: Ending) -> BaseModel:
        choices = [CompletionChoice(text=ending.text, finish_reason=ending.event.reason)]
        return self._answer(ending.header, choices).model_copy(update={"usage": ending.usage, "rope": ending.rope})

    def _answer(self, header: Header, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(id=header.id, created=header.created, model=header.model, choices=choices)


class ChatFormat:
    """POST /v1/chat/completions."""

    closing: str | None = "[DONE]"

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage

    def begin(self, header: Header) -> Iterable[BaseModel]:
        yield self._chunk(header, ChatDelta(role="assistant", content=""))

    def token(self, header: Header, _: int, text: str) -> Iterable[BaseModel]:
        if text:
            yield self._chunk(header, ChatDelta(content=text))

    def end(self, ending: Ending) -> Iterable[BaseModel]:
        if ending.text:
            yield self._chunk(ending.header, ChatDelta(content=ending.text))
        last = self._chunk(ending.header, ChatDelta(), ending.event.reason)
        last.rope = ending.rope
        yield last
        if self._include_usage:
            yield last.model_copy(update={"choices": [], "usage": ending.usage})

    def whole(self, ending: Ending) -> BaseModel:
        header = ending.header
        return ChatResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=[ChatChoice(message=ChatAnswer(content=ending.text), finish_reason=ending.event.reason)],
            usage=ending.usage,
            rope=ending.rope,
        )

    def _chunk(self, header: Header, delta: ChatDelta, finish_reason: str | None = None) -> ChatChunk:
        choice = ChatChunkChoice(delta=delta, finish_reason=finish_reason)
        return ChatChunk(id=header.id, created=header.created, model=header.model, choices=[choice])
