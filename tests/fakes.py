"""A fake model, so that the engine is tested in milliseconds, and short ways to make its parts.

The fake model keeps what it is told to write in pages, as a real one keeps keys, and reads its past from nowhere else:
a page that was lost, shared or overwritten changes its output.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from prometheus_client import CollectorRegistry

from model_patches.geometry import RopeGeometry
from service.cache.pages import PageAllocator
from service.core import Event, FinishEvent, SamplingParams, Sequence, TokenEvent
from service.engine.detokenize import TextStream
from service.engine.engine import Engine
from service.metrics import Metrics
from service.scaling.policy import Policy, RopeWish
from service.scheduler.scheduler import Scheduler

VOCABULARY = 128
PAGE_SIZE = 4
GEOMETRY = RopeGeometry(rotary_dim=8, theta=10000.0, original_length=64, native_length=64)


def next_token(tokens: list[int]) -> int:
    """What the fake model answers to a sequence: printable ASCII, depending on every token and its place."""
    mixed = 7
    for token in tokens:
        mixed = (mixed * 31 + token + 1) % 10007
    return 32 + mixed % 95


def expected_output(prompt: list[int], count: int) -> list[int]:
    """The fake model's greedy output after a prompt, computed without an engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class FakeRunner:
    """A runner whose pages hold token ids.

    Attributes:
        num_pages: pages in its pool.
        before_step: called with the number of each step and the step; may raise.
        steps: every step so far, as {request id: number of tokens}.
    """

    num_pages: int
    before_step: Callable[[int, Mapping[Sequence, int]], None] = lambda _number, _step: None
    steps: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slots = [-1] * (self.num_pages * PAGE_SIZE)

    @torch.inference_mode()
    def forward(self, step: Mapping[Sequence, int]) -> torch.Tensor:
        self.steps.append({sequence.request_id: tokens for sequence, tokens in step.items()})
        self.before_step(len(self.steps) - 1, step)
        rows = []
        for sequence, tokens in step.items():
            start, end = sequence.num_computed, sequence.num_computed + tokens
            slots = [sequence.pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE for place in range(end)]
            for slot, token in zip(slots[start:], sequence.tokens(start, end), strict=True):
                self._slots[slot] = token
            if end == sequence.num_tokens:
                rows.append(next_token([self._slots[slot] for slot in slots]))
        logits = torch.zeros(len(rows), VOCABULARY)
        logits[range(len(rows)), rows] = 10.0
        return logits


class ByteStream:
    """One character for each token."""

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
    new_text_stream: Callable[[], TextStream] = ByteStream

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.num_pages, self.before_step)
        self.pages = PageAllocator(self.num_pages, PAGE_SIZE)
        self.scheduler = Scheduler(self.pages, max_running=self.max_running, max_batch_tokens=self.max_batch_tokens)
        self.metrics = Metrics(CollectorRegistry())
        self.engine = Engine(self.runner, self.scheduler, self.new_text_stream, self.metrics, page_bytes=1)
        self.policy = Policy(GEOMETRY)
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
        return "".join(event.text for event in self.events[request_id])

    def token_ids(self, request_id: str) -> list[int]:
        """All the tokens that a request was sent."""
        return [event.token_id for event in self.events[request_id] if isinstance(event, TokenEvent)]

    def ends(self, request_id: str) -> list[FinishEvent]:
        """The terminal events that a request was sent: there should be one, at the end."""
        return [event for event in self.events[request_id] if isinstance(event, FinishEvent)]
