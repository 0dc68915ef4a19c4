"""Fake sequences that grow: a short ladder, the scheduler over the fake model, and what each sequence should answer,
computed without either."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from service.cache.pages import PageAllocator
from service.core import PageCopy, Rerotation, SamplingParams, Segment, Sequence
from service.scaling.policy import PlanChoice, Policy, RopeWish
from service.scheduler.scheduler import Scheduler
from tests.fakes import GEOMETRY, PAGE_SIZE, EngineUnderTest, FakeRunner, next_token

NATIVE_LENGTH = 10
POLICY = Policy(GEOMETRY, native_length=NATIVE_LENGTH)  # rungs of 10, 12, 15, 20, 25, 30 and 40 tokens
REPREFILL = RopeWish(growth="reprefill")


def history_at(choice: PlanChoice, length: int, refresh_tokens: int = 0) -> list[Segment]:
    """The plan history of a sequence whose tokens are so many, of which the last is not computed yet."""
    history = [Segment(0, choice.rungs[0])]
    for before, rung in zip(choice.rungs, choice.rungs[1:], strict=False):
        if length > before.max_length:
            start = 0 if choice.growth == "reprefill" else max(0, before.max_length - refresh_tokens)
            history = [segment for segment in history if segment.start < start]
            history.append(Segment(start, rung))
    return history


def answer(tokens: list[int], history: Iterable[Segment]) -> int:
    """The fake model's next token after tokens that went through a plan history."""
    factors = [0.0] * len(tokens)
    for segment in history:
        factors[segment.start :] = [segment.plan.factor] * (len(tokens) - segment.start)
    return next_token(tokens, factors)


def expected_growing(prompt: list[int], count: int, choice: PlanChoice, refresh_tokens: int = 0) -> list[int]:
    """The fake model's greedy output under growth of any kind, computed without an engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(tokens, history_at(choice, len(tokens), refresh_tokens)))
    return tokens[len(prompt) :]


class Step(NamedTuple):
    """A step that was computed, as {request id: tokens}, and the re-rotations and copies before it."""

    tokens: dict[str, int]
    rerotations: list[Rerotation]
    copies: list[PageCopy]


@dataclass
class Load:
    """A scheduler over the fake model. Whoever is up to date gets its next token; at its last it leaves."""

    num_pages: int = 64
    max_running: int = 8
    max_batch_tokens: int = 64
    prefix_caching: bool = True
    refresh_tokens: int = 0
    windows: tuple[int | None, ...] = (None,)
    live: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pages = PageAllocator(self.num_pages, PAGE_SIZE)
        self.runner = FakeRunner(self.num_pages)
        self.scheduler = Scheduler(
            self.pages,
            max_running=self.max_running,
            max_batch_tokens=self.max_batch_tokens,
            prefix_caching=self.prefix_caching,
            refresh_tokens=self.refresh_tokens,
            windows=self.windows,
        )
        self._arrivals = 0

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, wish: RopeWish | None = None) -> Sequence:
        """Let a request arrive, later than all before it."""
        choice = POLICY.choose(len(prompt), max_tokens, wish)
        sequence = Sequence(name, prompt, choice, SamplingParams(max_tokens), deliver=lambda _: None)
        sequence.arrival_time = self._arrivals
        self._arrivals += 1
        self.scheduler.add(sequence)
        self.live.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.scheduler.remove(sequence)

    def step(self) -> Step:
        """Schedule and compute one step."""
        step = self.scheduler.schedule()
        preparations = self.scheduler.take_preparations()
        for preparation in preparations:
            if isinstance(preparation, PageCopy):
                self.runner.copy([preparation])
            else:
                self.runner.rerotate(preparation)
        logits = self.runner.forward(step)
        ready = self.scheduler.complete(step)
        for sequence, row in zip(ready, logits, strict=True):
            sequence.output.append(int(row.argmax()))
            if len(sequence.output) == sequence.sampling.max_tokens:
                self.remove(sequence)
        self.pages.check()
        return Step(
            {sequence.request_id: tokens for sequence, tokens in step.items()},
            [each for each in preparations if isinstance(each, Rerotation)],
            [each for each in preparations if isinstance(each, PageCopy)],
        )

    def run(self) -> list[Step]:
        """Step until all have ended."""
        steps = []
        while self.live:
            steps.append(self.step())
            assert steps[-1].tokens, "nothing is computed although somebody waits"
        assert not self.step().tokens
        assert self.pages.num_used == 0
        return steps

    def run_until(self, sequence: Sequence, computed: int) -> None:
        """Step until so many tokens of a sequence are computed."""
        while sequence.num_computed < computed:
            self.step()
        assert sequence.num_computed == computed


@dataclass
class GrowingEngine(EngineUnderTest):
    """The engine under test with a short ladder."""

    policy: Policy = POLICY
