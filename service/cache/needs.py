"""Which of a sequence's pages each group of layers needs, by number. Knows windows and lengths; does not know where in
the pool these pages are."""

import sys
from collections.abc import Sequence


class PageNeeds:
    """A group whose layers see everything needs the pages of all tokens. A windowed one needs those that the next token
    sees and those of the tokens that are computed next: its pages are given back behind, and taken anew ahead.

    Attributes:
        page_size: tokens in one page.
        windows: for each group of layers, how many of the latest tokens it sees, the token itself included; None for
            all.
        has_windows: whether any group needs less than all.
    """

    def __init__(
        self,
        page_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        max_batch_tokens: int = 1,
        refresh_tokens: int = 0,
    ) -> None:
        """
        Args:
            page_size: tokens in one page.
            windows: of the groups, at least one.
            max_batch_tokens: tokens of one step, at most.
            refresh_tokens: how many of the latest tokens may have to be computed again, see `Scheduler`.
        """
        self.page_size = page_size
        self.windows = tuple(windows)
        self.has_windows = any(window is not None for window in windows)
        # Tokens before the next one that are still needed.
        self._reaches = [sys.maxsize if window is None else window - 1 + refresh_tokens for window in windows]
        # Pages that a run of so many tokens touches at most, wherever it begins.
        self._caps = [-(-(reach + max_batch_tokens - 1) // page_size) + 1 for reach in self._reaches]

    @property
    def groups(self) -> int:
        return len(self.windows)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold so many tokens in one group."""
        return -(-tokens // self.page_size)

    def first(self, group: int, computed: int) -> int:
        """The number in its sequence of the first page that a group needs once so many tokens are computed."""
        return max(0, computed - self._reaches[group]) // self.page_size

    def end(self, group: int, first: int, tokens: int) -> int:
        """The number of the page after the last one that a group holds of a sequence of so many known tokens.

        Args:
            group: of layers.
            first: the number of the first page that it holds.
            tokens: known tokens, computed or not.
        """
        return min(self.pages_for(tokens), first + self._caps[group])

    def most(self, tokens: int) -> int:
        """Pages, over all groups, that a sequence of so many tokens holds at most."""
        pages = self.pages_for(tokens)
        return sum(min(pages, cap) for cap in self._caps)

    def sequences(self, num_pages: int, tokens: int) -> float:
        """How many sequences of so many tokens some pages hold, pages of the sequences' ends shared out."""
        return num_pages * self.page_size / self._slots(tokens)

    def tokens(self, num_pages: int, length: int) -> int:
        """How many tokens some pages hold in sequences of a length."""
        return num_pages * self.page_size * length // self._slots(length)

    def _slots(self, tokens: int) -> int:
        """Places for a token, over all groups, that a sequence of so many tokens fills at most."""
        return sum(min(tokens, cap * self.page_size) for cap in self._caps)

    def longest_prefix(self, found: Sequence[Sequence[object]]) -> int:
        """How long a prefix a sequence can start with, in pages: each group has those that the token after it sees.

        Args:
            found: for each group, what was found of its pages, in order; None for one that was not.
        """
        longest = min(map(len, found))
        runs = []  # for each group and page: how many pages there are without a gap, up to this one
        for pages in found:
            run: list[int] = []
            for page in pages[:longest]:
                run.append(0 if page is None else (run[-1] if run else 0) + 1)
            runs.append(run)
        for count in range(longest, 0, -1):
            if all(
                run[count - 1] >= count - self.first(group, count * self.page_size) for group, run in enumerate(runs)
            ):
                return count
        return 0
