"""Beginnings that sequences share: found in the cache for one that starts, offered to others as it is computed. Knows
sequences and the index of pages; does not decide who starts."""

from collections.abc import Iterator
from dataclasses import dataclass

from model_patches.plan import PositionPlan
from service.cache.pages import PageAllocator
from service.cache.prefix import CachedPage, Variant, extend_digests, history_until
from service.core import PageMove, Rerotation, Segment, Sequence


@dataclass(frozen=True)
class Prefix:
    """Pages with which a sequence can start, and the state that it is in with them.

    Attributes:
        pages: in order, from the first of the sequence.
        history: the sequence's, those segments included that the pages went through under others.
        stage: the segment of the history whose plan the pages are to be rotated under.
        others: how many of the pages were computed, or rotated on the way, otherwise than the sequence would have.
    """

    pages: list[CachedPage]
    history: list[Segment]
    stage: int
    others: int = 0

    @property
    def plan(self) -> PositionPlan:
        return self.history[self.stage].plan

    @property
    def foreign(self) -> list[CachedPage]:
        """Pages that are rotated under another plan, so that they have to be copied and re-rotated."""
        return [cached for cached in self.pages if cached.plan != self.plan]


class Prefixes:
    """The shared beginnings of one pool of pages."""

    def __init__(self, pages: PageAllocator, *, enabled: bool) -> None:
        """
        Args:
            pages: the pool.
            enabled: where it is false, nothing is found or offered.
        """
        self._pages = pages
        self.enabled = enabled

    def candidates(self, sequence: Sequence) -> Iterator[Prefix]:
        """What a sequence without pages can start with, best first; last of all nothing. Only that for one whose
        prompt's log-probabilities are wanted: they take the whole computation.

        One token at least stays to be computed under the plan that it starts with: its logits are wanted, or it is what
        the step consists of.
        """
        if self.enabled and sequence.sampling.prompt_logprobs is None:
            self._digest(sequence)
            same_plan = self._of_own_history(sequence)
            pristine = len(sequence.history) == 1 and sequence.rung == 0 and not sequence.output
            if sequence.choice.prefix_reuse == "rerotate" and pristine:
                any_plan = self._of_any_history(sequence)
                if len(any_plan.pages) > len(same_plan.pages):
                    yield any_plan
            if same_plan.pages:
                yield same_plan
        yield Prefix([], sequence.history, 0)

    def attach(self, sequence: Sequence, prefix: Prefix, spare: int) -> list[Rerotation] | None:
        """Give a sequence a prefix and pages for the rest of its known tokens.

        Args:
            sequence: holds no pages.
            prefix: one of its candidates.
            spare: pages that must stay free.

        Returns:
            What has to be re-rotated before the sequence's first step; None where there are too few free pages, and
            then nothing has changed.
        """
        shared = [cached.page for cached in prefix.pages]
        foreign = prefix.foreign
        self._pages.share(shared)
        missing = self._pages.pages_for(sequence.num_tokens) - len(shared) + len(foreign)
        if missing + spare > self._pages.num_free:
            self._pages.release(shared)
            return None
        fresh = self._pages.allocate(missing)
        moves: dict[PositionPlan, list[PageMove]] = {}
        for number, cached in enumerate(prefix.pages):
            if cached.plan != prefix.plan:
                move = PageMove(cached.page, fresh.pop(), number)
                moves.setdefault(cached.plan, []).append(move)
                shared[number] = move.target
        # What is copied may be handed out already: it is written by the next step, or by a re-rotation that comes later
        # in the same list, which is carried out in order.
        self._pages.release([cached.page for cached in foreign])
        page_size = self._pages.page_size
        sequence.pages = shared + fresh
        sequence.history, sequence.stage = prefix.history, prefix.stage
        sequence.num_computed = len(shared) * page_size
        sequence.num_indexed = len(shared)
        sequence.num_private = len(shared) if prefix.others else 0
        return [Rerotation(sequence, old, prefix.plan, pages, len(pages) * page_size) for old, pages in moves.items()]

    def offer(self, sequence: Sequence) -> None:
        """Make the full pages that a sequence has computed known to others."""
        full = sequence.num_computed // self._pages.page_size
        if not self.enabled or sequence.num_indexed >= full:
            return
        self._digest(sequence)
        for number in range(max(sequence.num_indexed, sequence.num_private), full):
            page = sequence.pages[number]
            if page not in self._pages.index:
                history = history_until(sequence.history, (number + 1) * self._pages.page_size)
                self._pages.index.add(page, sequence.page_digests[number], Variant(history, sequence.plan))
        sequence.num_indexed = full

    def _digest(self, sequence: Sequence) -> None:
        if len(sequence.page_digests) < sequence.num_tokens // self._pages.page_size:
            extend_digests(sequence.page_digests, sequence.tokens(0, sequence.num_tokens), self._pages.page_size)

    def _usable(self, sequence: Sequence) -> list[bytes]:
        end = min(sequence.num_tokens, sequence.choice.rungs[sequence.rung].max_length)
        return sequence.page_digests[: (end - 1) // self._pages.page_size]

    def _of_own_history(self, sequence: Sequence) -> Prefix:
        """Pages computed as this sequence would compute them, at the latest stage of its history that they reach."""
        digests, page_size = self._usable(sequence), self._pages.page_size
        history = sequence.history
        for stage in range(len(history) - 1, -1, -1):
            most = (history[stage + 1].start - 1) // page_size if stage + 1 < len(history) else len(digests)
            found = self._pages.index.find(digests[:most], history, history[stage].plan)
            if found and len(found) * page_size >= history[stage].start:
                return Prefix([CachedPage(page, history[stage].plan) for page in found], history, stage)
        return Prefix([], history, 0)

    def _of_any_history(self, sequence: Sequence) -> Prefix:
        """Pages computed under any plans, for a sequence that has not been computed yet itself."""
        [own] = sequence.history
        pages, past = self._pages.index.find_any(self._usable(sequence), own.plan)
        if not pages:
            return Prefix([], sequence.history, 0)
        ends = range(self._pages.page_size, (len(pages) + 1) * self._pages.page_size, self._pages.page_size)
        own_way = sum(
            cached.plan == own.plan and history_until(past, end) == (own,)
            for cached, end in zip(pages, ends, strict=True)
        )
        history = list(past)
        if history[-1].plan != own.plan:
            history.append(Segment(len(pages) * self._pages.page_size, own.plan))
        return Prefix(pages, history, len(history) - 1, others=len(pages) - own_way)
