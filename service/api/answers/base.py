"""The three shapes of an answer, streamed and whole. Knows wire formats; does not know where tokens come from."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import time
from typing import Protocol

from pydantic import BaseModel

from service import core
from service.api.logprobs import LogprobShapes
from service.api.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
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
        tokens: for a whole answer all of them; in a stream none, they are out already.
        sequence: the request.
        event: its terminal event.
        header: the answer's header.
    """

    tokens: list[core.TokenEvent]
    sequence: core.Sequence
    event: core.FinishEvent
    header: Header

    @property
    def text(self) -> str:
        """What the tokens and the end itself brought."""
        return "".join(token.text for token in self.tokens) + self.event.text

    @property
    def usage(self) -> Usage:
        sequence = self.sequence
        prompt, completion = len(sequence.prompt), len(sequence.output)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sequence.num_prefix_tokens or 0),
        )

    @property
    def rope(self) -> RopeInfo:
        sequence, choice = self.sequence, self.sequence.choice
        plan = sequence.last_plan
        return RopeInfo(
            scheme=plan.scheme,
            mode=choice.mode,
            factor=plan.factor,
            growth=choice.growth,
            prefix_reuse=choice.prefix_reuse,
            reason=choice.reason,
            rerotations=sequence.num_rerotations,
            other_plan_prefix_tokens=sequence.num_other_plan_prefix_tokens,
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

    def token(self, header: Header, token: core.TokenEvent) -> Iterable[BaseModel]:
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

    def __init__(self, logprobs: LogprobShapes) -> None:
        self._logprobs = logprobs

    def begin(self, _: Header) -> Iterable[BaseModel]:
        return ()

    def token(self, header: Header, token: core.TokenEvent) -> Iterable[BaseModel]:
        logprobs = self._logprobs.generate([token])
        yield GenerateChunk(id=header.id, text=token.text, token_ids=[token.token_id], logprobs=logprobs)

    def end(self, ending: Ending) -> Iterable[BaseModel]:
        yield self.whole(ending)

    def whole(self, ending: Ending) -> BaseModel:
        return GenerateResponse(
            id=ending.header.id,
            model=ending.header.model,
            text=ending.text,
            token_ids=[token.token_id for token in ending.tokens],
            logprobs=self._logprobs.generate(ending.tokens),
            finish_reason=ending.event.reason,
            usage=ending.usage,
            rope=ending.rope,
            timing=ending.timing,
        )


class CompletionFormat:
    """POST /v1/completions."""

    closing: str | None = "[DONE]"

    def __init__(self, logprobs: LogprobShapes, *, include_usage: bool) -> None:
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._length = 0  # of the text that is out

    def begin(self, _: Header) -> Iterable[BaseModel]:
        return ()

    def token(self, header: Header, token: core.TokenEvent) -> Iterable[BaseModel]:
        logprobs = self._logprobs.completion([token], self._length)
        self._length += len(token.text)
        if token.text or logprobs:
            yield self._answer(header, [CompletionChoice(text=token.text, logprobs=logprobs, finish_reason=None)])

    def end(self, ending: Ending) -> Iterable[BaseModel]:
        last = self._answer(ending.header, [CompletionChoice(text=ending.text, finish_reason=ending.event.reason)])
        last.rope = ending.rope
        yield last
        if self._include_usage:
            yield self._answer(ending.header, []).model_copy(update={"usage": ending.usage, "rope": ending.rope})

    def whole(self, ending: Ending) -> BaseModel:
        logprobs = self._logprobs.completion(ending.tokens, 0)
        choice = CompletionChoice(text=ending.text, logprobs=logprobs, finish_reason=ending.event.reason)
        return self._answer(ending.header, [choice]).model_copy(update={"usage": ending.usage, "rope": ending.rope})

    def _answer(self, header: Header, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(id=header.id, created=header.created, model=header.model, choices=choices)


class ChatFormat:
    """POST /v1/chat/completions."""

    closing: str | None = "[DONE]"

    def __init__(self, logprobs: LogprobShapes, *, include_usage: bool) -> None:
        self._logprobs = logprobs
        self._include_usage = include_usage

    def begin(self, header: Header) -> Iterable[BaseModel]:
        yield self._chunk(header, ChatDelta(role="assistant", content=""))

    def token(self, header: Header, token: core.TokenEvent) -> Iterable[BaseModel]:
        logprobs = self._logprobs.chat([token])
        if token.text or logprobs:
            yield self._chunk(header, ChatDelta(content=token.text), logprobs=logprobs)

    def end(self, ending: Ending) -> Iterable[BaseModel]:
        if ending.text:
            yield self._chunk(ending.header, ChatDelta(content=ending.text))
        last = self._chunk(ending.header, ChatDelta(), finish_reason=ending.event.reason)
        last.rope = ending.rope
        yield last
        if self._include_usage:
            yield last.model_copy(update={"choices": [], "usage": ending.usage})

    def whole(self, ending: Ending) -> BaseModel:
        header = ending.header
        choice = ChatChoice(
            message=ChatAnswer(content=ending.text),
            logprobs=self._logprobs.chat(ending.tokens),
            finish_reason=ending.event.reason,
        )
        return ChatResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=[choice],
            usage=ending.usage,
            rope=ending.rope,
        )

    def _chunk(
        self,
        header: Header,
        delta: ChatDelta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return ChatChunk(id=header.id, created=header.created, model=header.model, choices=[choice])
