"""Which pages of the cache are free and which are used. Knows numbers of pages; does not know what they hold."""


class PageAllocator:
    """Hands out pages by number.

    Free and used pages together are always all pages; `check` proves it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """
        Args:
            num_pages: pages in the pool.
            page_size: tokens in one page.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take pages. The caller has seen that `num_free >= count`."""
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Give pages back. Each must have been allocated and not yet released."""
        assert self._used.issuperset(pages), "a page was released that is not in use"
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))

    def check(self) -> None:
        """Assert that no page is lost, doubled or both free and used."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert self._used.isdisjoint(free), "a page is both free and used"
        assert len(free) + len(self._used) == self.num_pages, (
            f"{len(free)} free + {len(self._used)} used pages are not {self.num_pages}"
        )
