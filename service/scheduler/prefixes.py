"""Beginnings that sequences share: found in the cache for one that starts, offered to others as it is computed. Knows
sequences and the index of pages; does not decide who starts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from model_patches.plan import PositionPlan
from service.cache.needs import PageNeeds
from service.cache.pages import PageAllocator
from service.cache.prefix import CachedPage, Variant, content_of, digest_before, extend_digests, history_until
from service.core import PageCopy, PageMove, PageTable, Preparation, Rerotation, Segment, Sequence


class CachedTable(NamedTuple):
    """What was found for one group of layers.

    Attributes:
        first: the number in the sequence of the first page.
        pages: in order, without a gap, to the end of the prefix.
    """

    first: int
    pages: list[CachedPage]


class PartlyShared(NamedTuple):
    """One further page that begins as a sequence goes on, but does not end so: the sequence gets a copy to write to.

    Attributes:
        tokens: how many of its first tokens are the sequence's; none where there is no such page.
        pages: one for each group of layers.
    """

    tokens: int = 0
    pages: tuple[int, ...] = ()


NO_PART = PartlyShared()
LEAST_PART = 8
"""A copy costs about what computing the n-th part of a page's tokens does; fewer are computed."""


@dataclass(frozen=True)
class Prefix:
    """Pages with which a sequence can start, and the state that it is in with them.

    Attributes:
        length: pages of the sequence that it covers as a whole.
        tables: for each group of layers, those of them that the token after the prefix sees.
        history: the sequence's, those segments included that the pages went through under others.
        stage: the segment of the history whose plan the pages are to be rotated under.
        others: how many of the pages were computed, or rotated on the way, otherwise than the sequence would have.
        part: what there is of the next page.
    """

    length: int
    tables: list[CachedTable]
    history: list[Segment]
    stage: int
    others: int = 0
    part: PartlyShared = NO_PART

    @property
    def plan(self) -> PositionPlan:
        return self.history[self.stage].plan

    @property
    def foreign(self) -> list[CachedPage]:
        """Pages that are rotated under another plan, so that they have to be copied and re-rotated."""
        return [cached for table in self.tables for cached in table.pages if cached.plan != self.plan]


class Prefixes:
    """The shared beginnings of one pool of pages."""

    def __init__(self, pages: PageAllocator, needs: PageNeeds, *, enabled: bool) -> None:
        """
        Args:
            pages: the pool.
            needs: which pages of a sequence each group of layers needs.
            enabled: where it is false, nothing is found or offered.
        """
        self._pages = pages
        self._needs = needs
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
                if any_plan.length > same_plan.length:
                    yield any_plan
            if same_plan.part.tokens:
                yield same_plan
            if same_plan.length:
                yield replace(same_plan, part=NO_PART)
        yield self._nothing(sequence)

    def attach(self, sequence: Sequence, prefix: Prefix, spare: int) -> list[Preparation] | None:
        """Give a sequence a prefix and pages for the rest of its known tokens.

        Args:
            sequence: holds no pages.
            prefix: one of its candidates.
            spare: pages that must stay free.

        Returns:
            What has to be re-rotated or copied before the sequence's first step; None where there are too few free
            pages, and then nothing has changed.
        """
        needs, num_tokens, part = self._needs, sequence.num_tokens, prefix.part
        shared = [cached.page for table in prefix.tables for cached in table.pages]
        foreign = prefix.foreign
        held = [*shared, *part.pages]
        self._pages.share(held)
        ends = [needs.end(group, table.first, num_tokens) for group, table in enumerate(prefix.tables)]
        needed = sum(end - table.first for table, end in zip(prefix.tables, ends, strict=True))
        missing = needed - len(shared) + len(foreign)
        if missing + spare > self._pages.num_free:
            self._pages.release(held)
            return None
        fresh = self._pages.allocate(missing)
        moves: dict[PositionPlan, list[PageMove]] = {}
        tables = []
        for group, (found, end) in enumerate(zip(prefix.tables, ends, strict=True)):
            pages = []
            for number, cached in enumerate(found.pages, start=found.first):
                page = cached.page
                if cached.plan != prefix.plan:
                    page = fresh.pop()
                    moves.setdefault(cached.plan, []).append(PageMove(cached.page, page, number, group))
                pages.append(page)
            rest = end - found.first - len(pages)
            pages += fresh[:rest]
            del fresh[:rest]
            tables.append(PageTable(found.first, pages))
        # What is copied may be handed out already: it is written by the next step, or by a preparation that comes later
        # in the same list, which is carried out in order.
        self._pages.release([*(cached.page for cached in foreign), *part.pages])
        page_size = self._pages.page_size
        sequence.tables = tables
        sequence.num_placed = min(ends) * page_size
        sequence.history, sequence.stage = prefix.history, prefix.stage
        sequence.num_computed = prefix.length * page_size + part.tokens
        sequence.num_indexed = prefix.length
        sequence.num_private = prefix.length if prefix.others else 0
        preparations: list[Preparation] = [
            Rerotation(sequence, old, prefix.plan, moved, len({move.number for move in moved}) * page_size)
            for old, moved in moves.items()
        ]
        if part.tokens:
            targets = tuple(table.pages[prefix.length - table.first] for table in tables)
            preparations.append(PageCopy(sequence, part.pages, targets, part.tokens))
        return preparations

    def offer(self, sequence: Sequence) -> None:
        """Make the full pages that a sequence has computed known to others."""
        full = sequence.num_computed // self._pages.page_size
        if not self.enabled or sequence.num_indexed >= full:
            return
        self._digest(sequence)
        for number in range(max(sequence.num_indexed, sequence.num_private), full):
            start, end = number * self._pages.page_size, (number + 1) * self._pages.page_size
            content = content_of(sequence.page_digests, sequence.tokens(start, end), number)
            history = history_until(sequence.history, end)
            for group, table in enumerate(sequence.tables):
                page = table.pages[number - table.first] if number >= table.first else None
                if page is not None and page not in self._pages.index:
                    self._pages.index.add(page, content, Variant(history, sequence.plan, group))
        sequence.num_indexed = full

    def _digest(self, sequence: Sequence) -> None:
        if len(sequence.page_digests) < sequence.num_tokens // self._pages.page_size:
            extend_digests(sequence.page_digests, sequence.tokens(0, sequence.num_tokens), self._pages.page_size)

    def _most(self, sequence: Sequence, stage: int) -> int:
        """How many tokens a sequence can start with at most at a stage of its history: one at least stays."""
        return min(sequence.num_tokens, sequence.computable_at(stage)) - 1

    def _nothing(self, sequence: Sequence) -> Prefix:
        return Prefix(0, [CachedTable(0, []) for _ in self._needs.windows], sequence.history, 0)

    def _of_own_history(self, sequence: Sequence) -> Prefix:
        """Pages computed as this sequence would compute them, at the latest stage of its history that they reach."""
        for stage in range(len(sequence.history) - 1, -1, -1):
            prefix = self._at_stage(sequence, stage)
            if prefix.length * self._pages.page_size >= sequence.history[stage].start:
                break  # at the first, which starts at 0, if at no other
        return replace(prefix, part=self._part(sequence, prefix))

    def _at_stage(self, sequence: Sequence, stage: int) -> Prefix:
        """Full pages computed as this sequence would compute them, rotated as they are at a stage of its history."""
        history = sequence.history
        plan = history[stage].plan
        digests = sequence.page_digests[: self._most(sequence, stage) // self._pages.page_size]
        found = self._find(digests, history, plan)
        length = self._needs.longest_prefix(found)
        own = [[None if page is None else CachedPage(page, plan) for page in pages] for pages in found]
        return Prefix(length, self._tables(length, own), history, stage)

    def _part(self, sequence: Sequence, prefix: Prefix) -> PartlyShared:
        """What there is, in every group, of the page after a prefix of a sequence's own history."""
        before = digest_before(sequence.page_digests, prefix.length)
        start = prefix.length * self._pages.page_size
        end = min(self._most(sequence, prefix.stage), start + self._pages.page_size)
        tokens, past = sequence.tokens(start, end), tuple(prefix.history[: prefix.stage + 1])
        find = self._pages.index.find_part
        found = [find(before, tokens, Variant(past, prefix.plan, group)) for group in range(self._needs.groups)]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return NO_PART
        agreeing = min(part.tokens for part in parts)
        if agreeing * LEAST_PART < self._pages.page_size:
            return NO_PART
        return PartlyShared(agreeing, tuple(part.page for part in parts))

    def _find(self, digests: list[bytes], history: list[Segment], plan: PositionPlan) -> list[list[int | None]]:
        """For each group what there is of its pages; of one that needs all of them the run from the first."""
        index = self._pages.index
        found: list[list[int | None]] = []
        for group, window in enumerate(self._needs.windows):
            if window is None:
                found.append([*index.find(digests, history, plan, group)])
            else:
                found.append(index.find_each(digests, history, plan, group))
            digests = digests[: len(found[-1])]
        return found

    def _of_any_history(self, sequence: Sequence) -> Prefix:
        """Pages computed under any plans, for a sequence that has not been computed yet itself."""
        [own] = sequence.history
        page_size = self._pages.page_size
        digests = sequence.page_digests[: self._most(sequence, 0) // page_size]
        run, past = self._pages.index.find_any(digests, own.plan)
        others = range(1, self._needs.groups)
        find = self._pages.index.find_each_rotated
        found: list[list[CachedPage | None]] = [[*run]]
        found += [find(digests[: len(run)], past, own.plan, group) for group in others]
        length = self._needs.longest_prefix(found)
        if not length:
            return self._nothing(sequence)
        tables = self._tables(length, found)
        own_way = sum(
            history_until(past, (number + 1) * page_size) == (own,)
            and all(table.pages[number - table.first].plan == own.plan for table in tables if number >= table.first)
            for number in range(length)
        )
        history = list(history_until(past, length * page_size))
        if history[-1].plan != own.plan:
            history.append(Segment(length * page_size, own.plan))
        return Prefix(length, tables, history, len(history) - 1, others=length - own_way)

    def _tables(self, length: int, found: Iterable[list[CachedPage | None]]) -> list[CachedTable]:
        """Of what was found, the pages that the token after a prefix sees."""
        firsts = (self._needs.first(group, length * self._pages.page_size) for group in range(self._needs.groups))
        return [
            CachedTable(first, [page for page in pages[first:length] if page is not None])
            for first, pages in zip(firsts, found, strict=True)
        ]
