"""A fake model, so that the engine is tested in milliseconds, and short ways to make its parts.

The fake model keeps what it is told to write in pages, as a real one keeps keys, and reads its past from nowhere else:
a page that was lost, shared or overwritten changes its output, and so does one that was computed under another plan. A
key that is rotated under another plan than its sequence's is an error.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from prometheus_client import CollectorRegistry

from model_patches.geometry import RopeGeometry
from model_patches.plan import PositionPlan
from service.cache.pages import PageAllocator
from service.core import Event, FinishEvent, PageCopy, PromptEvent, Rerotation, SamplingParams, Sequence, TokenEvent
from service.engine.detokenize import TextStream
from service.engine.engine import Engine
from service.metrics import Metrics
from service.scaling.policy import PlanChoice, Policy, RopeWish
from service.scheduler.scheduler import Scheduler

VOCABULARY = 128
PAGE_SIZE = 4
GEOMETRY = RopeGeometry(rotary_dim=8, theta=10000.0, original_length=64, native_length=64)


@dataclass(frozen=True)
class Cell:
    """What the fake model caches of a token: the plan it was computed under, and the one its key is rotated under."""

    token: int
    origin: PositionPlan
    plan: PositionPlan


def next_token(tokens: Iterable[int], factors: Iterable[float] = ()) -> int:
    """What the fake model answers to a sequence: printable ASCII, depending on every token, its place, and the factor
    that it was computed under (1 where none is given)."""
    mixed = 7
    for token, factor in zip_longest(tokens, factors, fillvalue=1.0):
        mixed = (mixed * 31 + int(token) + 1 + 13 * round(100 * (factor - 1))) % 10007
    return 32 + mixed % 95


def expected_output(prompt: list[int], count: int, choice: PlanChoice | None = None) -> list[int]:
    """The fake model's greedy output after a prompt, computed without an engine.

    Under growth each token is computed under the first of the choice's rungs that reaches it.
    """
    rungs = (choice or Policy(GEOMETRY).choose(1, 1)).rungs
    tokens = list(prompt)

    def factor(place: int) -> float:
        return next((rung for rung in rungs if place < rung.max_length), rungs[-1]).factor

    for _ in range(count):
        tokens.append(next_token(tokens, map(factor, range(len(tokens)))))
    return tokens[len(prompt) :]


@dataclass
class FakeRunner:
    """A runner whose pages hold token ids.

    Attributes:
        num_pages: pages in its pool.
        before_step: called with the number of each step and the step; may raise.
        answer: what it answers to tokens and the factors that they were computed under.
        script: tokens that the model writes after a sequence's prompt before its usual ones; None for none.
        steps: every step so far, as {request id: number of tokens}.
        rerotations: every re-rotation so far.
        copies: all so far.
    """

    num_pages: int
    before_step: Callable[[int, Mapping[Sequence, int]], None] = lambda _number, _step: None
    script: Callable[[Sequence], list[int] | None] = lambda _: None
    answer: Callable[[Iterable[int], Iterable[float]], int] = next_token
    steps: list[dict[str, int]] = field(default_factory=list)
    rerotations: list[Rerotation] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slots: list[Cell | None] = [None] * (self.num_pages * PAGE_SIZE)

    @torch.inference_mode()
    def forward(self, step: Mapping[Sequence, int]) -> torch.Tensor:
        self.steps.append({sequence.request_id: tokens for sequence, tokens in step.items()})
        self.before_step(len(self.steps) - 1, step)
        rows = []
        for sequence, tokens in step.items():
            start, end = sequence.num_computed, sequence.num_computed + tokens
            [table] = sequence.tables
            slots = [table.pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE for place in range(end)]
            for slot, token in zip(slots[start:], sequence.tokens(start, end), strict=True):
                self._slots[slot] = Cell(token, sequence.plan, sequence.plan)
            cells = [self._slots[slot] for slot in slots]
            assert all(cell is not None and cell.plan == sequence.plan for cell in cells), "a key of another plan"
            script, first = self.script(sequence) or [], len(sequence.prompt) - 1
            for place in sequence.logits_wanted(tokens):
                if 0 <= place + start - first < len(script):
                    rows.append(script[place + start - first])
                    continue
                known = [cell for cell in cells[: start + place + 1] if cell is not None]
                rows.append(self.answer((cell.token for cell in known), (cell.origin.factor for cell in known)))
        logits = torch.zeros(len(rows), VOCABULARY)
        logits[range(len(rows)), rows] = 10.0
        return logits

    def copy(self, copies: SequenceOf[PageCopy]) -> None:
        self.copies += copies
        contents = [self._page(source)[: copy.tokens] for copy in copies for source in copy.sources]
        targets = [target for copy in copies for target in copy.targets]
        for target, cells in zip(targets, contents, strict=True):
            assert None not in cells, "a key that was never written"
            self._slots[target * PAGE_SIZE : target * PAGE_SIZE + len(cells)] = cells

    def rerotate(self, rerotation: Rerotation) -> None:
        self.rerotations.append(rerotation)
        contents = {move: self._page(move.source) for move in rerotation.moves}
        for before, (move, cells) in enumerate(contents.items()):
            held = min(PAGE_SIZE, rerotation.tokens - before * PAGE_SIZE)  # only of the last page a part
            for place, cell in enumerate(cells[:held]):
                assert cell is not None, "a key that was never written"
                assert cell.plan == rerotation.old, "a key that is not rotated as said"
                self._slots[move.target * PAGE_SIZE + place] = replace(cell, plan=rerotation.new)

    def _page(self, page: int) -> list[Cell | None]:
        return self._slots[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]


class ByteStream:
    """One character for each token, whichever are to be seen."""

    def __init__(self, visible_token_ids: frozenset[int] = frozenset()) -> None:
        del visible_token_ids

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


@dataclass
class EngineUnderTest:
    """An engine on a fake model, with everything that a test looks at."""

    num_pages: int = 64
    max_running: int = 8
    max_batch_tokens: int = 16
    before_step: Callable[[int, Mapping[Sequence, int]], None] = lambda _number, _step: None
    new_text_stream: Callable[[frozenset[int]], TextStream] = ByteStream
    prefix_caching: bool = True
    refresh_tokens: int = 0
    policy: Policy = field(default_factory=lambda: Policy(GEOMETRY))
    answer: Callable[[Iterable[int], Iterable[float]], int] = next_token
    max_draft: int = 0
    max_rows_with_drafts: int = 16

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.num_pages, self.before_step, answer=self.answer)
        self.pages = PageAllocator(self.num_pages, PAGE_SIZE)
        self.scheduler = Scheduler(
            self.pages,
            max_running=self.max_running,
            max_batch_tokens=self.max_batch_tokens,
            prefix_caching=self.prefix_caching,
            refresh_tokens=self.refresh_tokens,
        )
        self.metrics = Metrics(CollectorRegistry())
        self.engine = Engine(
            *(self.runner, self.scheduler, self.new_text_stream, self.metrics),
            page_bytes=1,
            max_draft=self.max_draft,
            max_rows_with_drafts=self.max_rows_with_drafts,
        )
        self.events: dict[str, list[Event]] = {}

    def sequence(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        wish: RopeWish | None = None,
    ) -> Sequence:
        """A sequence whose events are recorded; greedy, 8 tokens, unless said otherwise."""
        sampling = sampling or SamplingParams(max_tokens=8, temperature=0.0)
        choice = self.policy.choose(len(prompt), sampling.max_tokens, wish)
        self.events[request_id] = []
        return Sequence(request_id, prompt, choice, sampling, deliver=self.events[request_id].append)

    def run(self) -> None:
        """Step until there is nothing to do, then check that the pool is whole."""
        while self.engine.step():
            pass
        self.pages.check()

    def text(self, request_id: str) -> str:
        """All the text that a request was sent."""
        return "".join(event.text for event in self.events[request_id] if not isinstance(event, PromptEvent))

    def token_ids(self, request_id: str) -> list[int]:
        """All the tokens that a request was sent."""
        return [event.token_id for event in self.events[request_id] if isinstance(event, TokenEvent)]

    def ends(self, request_id: str) -> list[FinishEvent]:
        """The terminal events that a request was sent: there should be one, at the end."""
        return [event for event in self.events[request_id] if isinstance(event, FinishEvent)]
