"""Which page goes on with which tokens after a beginning. Knows tokens and numbers of pages; a beginning is whatever
tells it from others."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from operator import eq
from typing import NamedTuple


class PartOfPage(NamedTuple):
    """A page, and how many of its first tokens are those that were looked for."""

    page: int
    tokens: int


class Continuations:
    """The pages that follow each beginning, sorted by their tokens: of those the one that agrees longest with others
    stands beside the place where these would be. So a look-up takes time with the logarithm of their number."""

    def __init__(self) -> None:
        self._after: dict[Hashable, list[tuple[tuple[int, ...], int]]] = {}

    def add(self, beginning: Hashable, tokens: tuple[int, ...], page: int) -> None:
        """Make a page known."""
        insort(self._after.setdefault(beginning, []), (tokens, page))

    def remove(self, beginning: Hashable, tokens: tuple[int, ...], page: int) -> None:
        """Make a page unknown that was added like that."""
        known = self._after[beginning]
        del known[bisect_left(known, (tokens, page))]
        if not known:
            del self._after[beginning]

    def find(self, beginning: Hashable, tokens: Sequence[int]) -> PartOfPage | None:
        """The page after a beginning whose first tokens agree longest with these; None where not even one does."""
        known = self._after.get(beginning, [])
        place = bisect_left(known, (tuple(tokens), 0))
        beside = [PartOfPage(page, _agreement(own, tokens)) for own, page in known[max(0, place - 1) : place + 1]]
        longest = max(beside, key=lambda part: part.tokens, default=None)
        return longest if longest is not None and longest.tokens else None


def _agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two sequences have in common."""
    same = map(eq, one, other)
    return next((count for count, is_same in enumerate(same) if not is_same), min(len(one), len(other)))
