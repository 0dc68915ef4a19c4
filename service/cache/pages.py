"""Which pages of the cache are free and which are held, and by how many. Knows numbers of pages; does not know what
they hold, but for whether it is worth keeping."""

from collections.abc import Sequence

from service.cache.prefix import PrefixIndex


class PageAllocator:
    """Hands out pages by number, counts their holders and takes them back.

    A page that nobody holds is free; where the index knows it, its content is kept as long as there are others to hand
    out, the one longest out of use first. Free and used pages together are always all pages; `check` proves it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """
        Args:
            num_pages: pages in the pool.
            page_size: tokens in one page.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.index = PrefixIndex(page_size)
        self.num_evictions = 0
        self._empty = list(range(num_pages - 1, -1, -1))
        self._kept: dict[int, None] = {}  # free pages that the index knows, longest out of use first
        self._holders: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._empty) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Free pages whose content can be found again."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return len(self._holders)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders.get(page, 0)

    def allocate(self, count: int) -> list[int]:
        """Take pages for one holder. The caller has seen that `num_free >= count`."""
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} free"
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that the index knows, whoever else holds them."""
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back, in the order of their sequence: the last ones are the first to be reused."""
        in_use = len(set(pages)) == len(pages) and self._holders.keys() >= set(pages)
        assert in_use, "a page was released that is not in use"
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                if page in self.index:
                    self._kept[page] = None
                else:
                    self._empty.append(page)

    def check(self) -> None:
        """Assert that no page is lost, doubled or both free and used, and that what the index knows exists."""
        empty, kept, used = set(self._empty), set(self._kept), set(self._holders)
        assert len(empty) == len(self._empty), "a page is free twice"
        assert used.isdisjoint(empty | kept), "a page is both free and used"
        assert empty.isdisjoint(kept), "a page is both empty and kept"
        assert len(empty) + len(kept) + len(used) == self.num_pages, (
            f"{len(empty) + len(kept)} free + {len(used)} used pages are not {self.num_pages}"
        )
        assert all(holders > 0 for holders in self._holders.values()), "a used page has no holder"
        known = set(self.index)
        assert kept <= known, "a page is kept that the index does not know"
        assert known <= kept | used, "the index knows a page that is empty"

    def _evict(self) -> int:
        page = next(iter(self._kept))
        del self._kept[page]
        self.index.forget(page)
        self.num_evictions += 1
        return page
