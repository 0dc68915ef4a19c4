"""What the three shapes of an answer have in common. Does not know where tokens come from."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import time

from pydantic import BaseModel

from service import core
from service.api.responses import PromptTokensDetails, RopeInfo, TimingInfo, Usage


@dataclass(frozen=True)
class Header:
    """What every part of one answer begins with.

    Attributes:
        id: of the request.
        model: its name.
        native_length: tokens that the model was trained to use.
        num_choices: of the answer.
        choices_per_prompt: how many of them follow one prompt.
        created: Unix time, in seconds.
    """

    id: str
    model: str
    native_length: int
    num_choices: int = 1
    choices_per_prompt: int = 1
    created: int = field(default_factory=lambda: int(time()))


@dataclass(frozen=True)
class Ending:
    """How a choice ended well.

    Attributes:
        index: which choice.
        prompt: the prompt's tokens that were told; in a stream none, they are out already.
        tokens: all generated tokens; in a stream none.
        sequence: the choice, as the engine has it.
        event: its terminal event.
        header: the answer's header.
    """

    index: int
    prompt: list[core.TokenEvent]
    tokens: list[core.TokenEvent]
    sequence: core.Sequence
    event: core.FinishEvent
    header: Header

    @property
    def text(self) -> str:
        """What the tokens and the end itself brought."""
        return "".join(token.text for token in self.tokens) + self.event.text

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
    def rope_if_several(self) -> RopeInfo | None:
        """The plan, where the answer has several choices, which may have ended under different ones."""
        return self.rope if self.header.num_choices > 1 else None

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


def usage(endings: Sequence[Ending]) -> Usage:
    """Tokens of a whole request: each prompt counts once, however many choices follow it.

    Args:
        endings: of all its choices, in order.
    """
    firsts = [ending.sequence for ending in endings[:: endings[0].header.choices_per_prompt]]
    prompt = sum(len(sequence.prompt) for sequence in firsts)
    completion = sum(len(ending.sequence.output) for ending in endings)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(s.num_prefix_tokens or 0 for s in firsts)),
    )


class AnswerFormat(ABC):
    """One route's shapes, for one request: `stream` methods give the events of a stream, `whole` the answer in one
    piece."""

    closing: str | None = None
    """What ends a stream after its last event, None for nothing."""

    def begin(self, _: Header) -> Iterable[BaseModel]:
        """Events before the first token."""
        return ()

    def prompt(self, _header: Header, _index: int, _tokens: Sequence[core.TokenEvent]) -> Iterable[BaseModel]:
        """Events of more prompt tokens."""
        return ()

    @abstractmethod
    def token(self, header: Header, index: int, token: core.TokenEvent) -> Iterable[BaseModel]:
        """Events of one more token of a choice."""

    @abstractmethod
    def end(self, ending: Ending) -> Iterable[BaseModel]:
        """The last events of a choice."""

    def close(self, _: Sequence[Ending]) -> Iterable[BaseModel]:
        """Events after the ends of all choices."""
        return ()

    def keep(self, index: int, token: core.TokenEvent) -> None:  # noqa: B027 - most have no need to
        """Take note of one more token of an answer that will be told as a whole."""

    def is_complete(self, _: int) -> bool:
        """Whether a choice needs no more tokens."""
        return False

    @abstractmethod
    def whole(self, endings: Sequence[Ending]) -> BaseModel:
        """The answer in one piece."""
