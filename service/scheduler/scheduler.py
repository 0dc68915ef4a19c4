"""Which request gets how many tokens in the next step. Knows sequences and page counts; no torch here."""

import itertools
import time
from collections import deque

from service.cache.pages import PageAllocator
from service.core import Sequence


class Scheduler:
    """Decides each step and owns the sequences that wait and run.

    A step is `{sequence: number of tokens}`: a prefill, a chunk of one and a decode differ only in that number.

    Decoding rows come first. What is left of the token budget goes to prompts by deadline: the scheduler's clock counts
    computed tokens, and a prompt of n tokens that starts when the clock shows t is due at t + n, as if it had the
    machine to itself. So a short prompt passes a long one that has much left to do, and a long one is overtaken only
    by prompts that arrived while it could have been served.

    A sequence starts when there are pages for all its known tokens. When a running one needs a page and none is free,
    the youngest gives its pages back and is computed again later; its output so far is kept.
    """

    def __init__(self, pages: PageAllocator, *, max_running: int, max_batch_tokens: int) -> None:
        """
        Args:
            pages: where pages come from and return to.
            max_running: at most so many sequences run at a time.
            max_batch_tokens: at most so many tokens in a step; no less than max_running.
        """
        assert max_batch_tokens >= max_running
        self.pages = pages
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._clock = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Whole, it must fit the pool."""
        assert self.pages.pages_for(sequence.num_tokens_at_most) <= self.pages.num_pages
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended; its pages return at once."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def schedule(self) -> dict[Sequence, int]:
        """Choose the next step and give each of its sequences the pages it needs.

        Returns:
            How many tokens of each sequence to compute; empty when there is nothing to do.
        """
        self._start_waiting()
        step: dict[Sequence, int] = {}
        budget = self._max_batch_tokens
        for sequence in sorted(self.running, key=lambda s: (s.num_uncomputed > 1, s.deadline)):
            tokens = min(sequence.num_uncomputed, budget)
            if tokens > 0 and sequence in self.running and self._grow(sequence, step):
                step[sequence] = tokens
                budget -= tokens
        self._clock += sum(step.values())
        for sequence in step:
            if sequence.scheduled_time is None:
                sequence.scheduled_time = time.monotonic()
        return step

    def complete(self, step: dict[Sequence, int]) -> list[Sequence]:
        """Record that a step was computed.

        Returns:
            The sequences that now need their next token.
        """
        for sequence, tokens in step.items():
            sequence.num_computed += tokens
        return [sequence for sequence in step if sequence.num_uncomputed == 0]

    def _start_waiting(self) -> None:
        while self.waiting and len(self.running) < self._max_running:
            needed = self.pages.pages_for(self.waiting[0].num_tokens)
            # One page to spare for each sequence that runs already, or the newcomer would soon be preempted.
            if needed + len(self.running) > self.pages.num_free:
                return
            sequence = self.waiting.popleft()
            sequence.pages = self.pages.allocate(needed)
            sequence.deadline = self._clock + sequence.num_tokens
            self.running.append(sequence)

    def _grow(self, sequence: Sequence, step: dict[Sequence, int]) -> bool:
        """Make sure that a sequence has pages for all its known tokens; False if it had to give way itself."""
        missing = self.pages.pages_for(sequence.num_tokens) - len(sequence.pages)
        while missing > self.pages.num_free:
            youngest = max(self.running, key=lambda s: s.arrival_time)
            step.pop(youngest, None)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        if missing > 0:
            sequence.pages += self.pages.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        position = sum(1 for _ in itertools.takewhile(lambda s: s.arrival_time < sequence.arrival_time, self.waiting))
        self.waiting.insert(position, sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        sequence.pages = []
        sequence.num_computed = 0
