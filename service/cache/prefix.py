"""Which page of the cache holds which tokens, computed how. Knows page numbers and plan histories; does not know who
holds a page, or what is in it."""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from model_patches.plan import PositionPlan
from service.cache.continuations import Continuations, PartOfPage
from service.core import Segment


class Variant(NamedTuple):
    """What shaped the values in a page, beside the tokens up to its end.

    Attributes:
        history: the plans under which those tokens were computed.
        plan: the plan that the page's keys are rotated under, the last of the history or a later one.
        group: the group of layers whose keys and values they are.
    """

    history: tuple[Segment, ...]
    plan: PositionPlan
    group: int = 0


class Content(NamedTuple):
    """The tokens of a full page.

    Attributes:
        before: the digest of all tokens before it; empty for a first page.
        tokens: its own.
        digest: of all tokens up to its end.
    """

    before: bytes
    tokens: tuple[int, ...]
    digest: bytes


class CachedPage(NamedTuple):
    """A page that was found, and the plan that its keys are rotated under."""

    page: int
    plan: PositionPlan


def extend_digests(digests: list[bytes], tokens: Sequence[int], page_size: int) -> None:
    """Bring a chain of digests up to date: one for each full page of tokens, over all tokens up to its end."""
    for end in range((len(digests) + 1) * page_size, len(tokens) + 1, page_size):
        page = array("q", tokens[end - page_size : end]).tobytes()
        digests.append(hashlib.blake2b(page, key=digests[-1] if digests else b"", digest_size=16).digest())


def content_of(digests: Sequence[bytes], tokens: Sequence[int], number: int) -> Content:
    """What a page of a sequence holds.

    Args:
        digests: of the sequence's pages.
        tokens: the page's own.
        number: which of them it is, from 0.
    """
    return Content(digest_before(digests, number), tuple(tokens), digests[number])


def digest_before(digests: Sequence[bytes], number: int) -> bytes:
    """The digest of all tokens before a page."""
    return digests[number - 1] if number else b""


def history_until(history: Iterable[Segment], end: int) -> tuple[Segment, ...]:
    """The part of a plan history that the tokens before `end` went through."""
    return tuple(segment for segment in history if segment.start < end)


class PrefixIndex:
    """Finds full pages by their tokens and by how these were computed. Belongs to one model and one cache dtype.

    A page is found under the plan history that it has, so never by a sequence that would have computed it otherwise,
    unless that asks for any history. Indexed pages must not be written.
    """

    def __init__(self, page_size: int) -> None:
        """
        Args:
            page_size: tokens in one page.
        """
        self._page_size = page_size
        self._pages: dict[bytes, dict[Variant, int]] = {}
        self._keys: dict[int, tuple[Content, Variant]] = {}
        self._continuations = Continuations()

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def add(self, page: int, content: Content, variant: Variant) -> None:
        """Make a full page known; where an equal one is known already, this one stays unknown."""
        assert page not in self._keys
        variants = self._pages.setdefault(content.digest, {})
        if variant not in variants:
            variants[variant] = page
            self._keys[page] = (content, variant)
            self._continuations.add((content.before, variant), content.tokens, page)

    def forget(self, page: int) -> None:
        """Make a page unknown: it is about to be written."""
        content, variant = self._keys.pop(page)
        self._continuations.remove((content.before, variant), content.tokens, page)
        del self._pages[content.digest][variant]
        if not self._pages[content.digest]:
            del self._pages[content.digest]

    def find(
        self, digests: Sequence[bytes], history: Sequence[Segment], plan: PositionPlan, group: int = 0
    ) -> list[int]:
        """The longest run of pages, from the first, that went through a history and are rotated under a plan."""
        run = takewhile(lambda page: page is not None, self._look_up(digests, history, plan, group))
        return [page for page in run if page is not None]

    def find_each(
        self, digests: Sequence[bytes], history: Sequence[Segment], plan: PositionPlan, group: int
    ) -> list[int | None]:
        """The same, but for every digest: None where there is no such page."""
        return list(self._look_up(digests, history, plan, group))

    def find_each_rotated(
        self, digests: Sequence[bytes], history: Sequence[Segment], plan: PositionPlan, group: int
    ) -> list[CachedPage | None]:
        """The same whatever the pages are rotated under, those under a plan preferred."""
        found: list[CachedPage | None] = []
        for number, digest in enumerate(digests, start=1):
            past = history_until(history, number * self._page_size)
            pages = [
                CachedPage(page, variant.plan)
                for variant, page in self._pages.get(digest, {}).items()
                if variant.group == group and variant.history == past
            ]
            found.append(max(pages, key=lambda cached: cached.plan == plan, default=None))
        return found

    def find_any(self, digests: Sequence[bytes], plan: PositionPlan) -> tuple[list[CachedPage], tuple[Segment, ...]]:
        """The first group's longest run of pages, from the first, of any one history, whatever they are rotated under.

        Args:
            digests: of the pages to look for.
            plan: pages that are rotated under this one are preferred.

        Returns:
            The pages, and the history that their tokens went through.
        """
        levels: list[dict[tuple[Segment, ...], CachedPage]] = []  # the pages of each number that a run reaches
        for digest in digests:
            start = len(levels) * self._page_size
            level: dict[tuple[Segment, ...], CachedPage] = {}
            for (history, own, group), page in self._pages.get(digest, {}).items():
                reached = not levels or history_until(history, start) in levels[-1]
                if group == 0 and reached and (own == plan or history not in level):
                    level[history] = CachedPage(page, own)
            if not level:
                break
            levels.append(level)
        if not levels:
            return [], ()
        runs = {history: self._run(levels, history) for history in levels[-1]}
        history = max(runs, key=lambda history: sum(cached.plan == plan for cached in runs[history]))
        return runs[history], history

    def find_part(self, before: bytes, tokens: Sequence[int], variant: Variant) -> PartOfPage | None:
        """The page of a variant of which most first tokens can be used.

        Args:
            before: the digest of all tokens before it.
            tokens: those that follow them, as many as can be used.
            variant: the page's; its history is the one of all its tokens.
        """
        return self._continuations.find((before, variant), tokens)

    def _look_up(
        self, digests: Sequence[bytes], history: Sequence[Segment], plan: PositionPlan, group: int
    ) -> Iterator[int | None]:
        variant, same_until = Variant((), plan, group), 0
        for number, digest in enumerate(digests, start=1):
            end = number * self._page_size
            if end > same_until:
                variant = Variant(history_until(history, end), plan, group)
                same_until = next((segment.start for segment in history if segment.start >= end), sys.maxsize)
            yield self._pages.get(digest, {}).get(variant)

    def _run(
        self, levels: Sequence[Mapping[tuple[Segment, ...], CachedPage]], history: tuple[Segment, ...]
    ) -> list[CachedPage]:
        ends = range(self._page_size, (len(levels) + 1) * self._page_size, self._page_size)
        return [level[history_until(history, end)] for level, end in zip(levels, ends, strict=True)]
