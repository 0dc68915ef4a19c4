"""The allocator: whatever is asked of it, no page is lost, doubled or handed out twice."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model_patches.plan import PositionPlan
from service.cache.pages import PageAllocator
from service.cache.prefix import Content, Variant

VARIANT = Variant((), PositionPlan("default", 1.0, 64, (1.0,), 1.0))


def content(number: int) -> Content:
    """That of a first page, another for each number."""
    return Content(b"", (number,) * 4, number.to_bytes(8, "big"))


class AllocatorMachine(RuleBasedStateMachine):
    """Allocates, shares, makes known and releases at random, and remembers who holds what and what was kept when."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(0, 1)
        self.held: list[list[int]] = []
        self.kept: list[int] = []  # free but known, longest out of use first
        self.known: set[int] = set()
        self.num_digests = 0
        self.num_evictions = 0

    @initialize(num_pages=st.integers(0, 12))
    def make(self, num_pages: int) -> None:
        self.pages = PageAllocator(num_pages, 4)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pages.num_free))
        evicted = self.kept[: max(0, count - (self.pages.num_free - len(self.kept)))]
        taken = self.pages.allocate(count)
        assert len(taken) == count
        assert set(taken) & set(self.kept) == set(evicted), "kept pages go last, longest out of use first"
        self.kept = self.kept[len(evicted) :]
        self.known -= set(evicted)
        self.num_evictions += len(evicted)
        self.held.append(taken)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def make_a_held_page_known(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({page for pages in self.held for page in pages})))
        if page not in self.known:
            self.pages.index.add(page, content(self.num_digests), VARIANT)
            self.num_digests += 1
            self.known.add(page)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def share_known_pages(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.known)), unique=True))
        self.pages.share(pages)
        self.kept = [page for page in self.kept if page not in pages]
        self.held.append(pages)

    @rule(data=st.data())
    def forget_a_known_page_before_it_is_written(self, data: st.DataObject) -> None:
        known_and_held = sorted(self.known - set(self.kept))
        if known_and_held:
            page = data.draw(st.sampled_from(known_and_held))
            self.pages.index.forget(page)
            self.known.remove(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_some_of_one_holder(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(range(len(self.held))))
        pages = self.held.pop(holder)
        stay = data.draw(st.integers(0, len(pages)))
        self.pages.release(pages[stay:])
        self.held.append(pages[:stay])
        still_held = {page for pages in self.held for page in pages}
        self.kept += [page for page in reversed(pages[stay:]) if page in self.known - still_held]

    @invariant()
    def every_page_has_the_holders_that_took_it_and_all_others_are_free(self) -> None:
        held = Counter(page for pages in self.held for page in pages)
        assert set(held) <= set(range(self.pages.num_pages))
        assert [self.pages.holders(page) for page in range(self.pages.num_pages)] == [
            held[page] for page in range(self.pages.num_pages)
        ]
        assert self.pages.num_used == len(held)
        assert self.pages.num_free == self.pages.num_pages - len(held)
        self.pages.check()

    @invariant()
    def what_was_known_stays_known_until_it_is_forgotten_or_evicted(self) -> None:
        assert set(self.pages.index) == self.known
        assert self.pages.num_kept == len(self.kept)
        assert self.pages.num_evictions == self.num_evictions

    def teardown(self) -> None:
        for pages in self.held:
            self.pages.release(pages)
        self.pages.check()
        assert sorted(self.pages.allocate(self.pages.num_pages)) == list(range(self.pages.num_pages))
        assert list(self.pages.index) == []


AllocatorMachine.TestCase.settings = settings(deadline=None, max_examples=150)
TestAllocator = AllocatorMachine.TestCase


def test_more_pages_than_are_free_are_never_handed_out() -> None:
    pages = PageAllocator(3, 4)
    pages.allocate(2)
    with pytest.raises(AssertionError, match="2 pages asked for, 1 free"):
        pages.allocate(2)
    pages.check()
    assert pages.num_free == 1


def test_a_page_that_is_not_in_use_cannot_be_released() -> None:
    pages = PageAllocator(3, 4)
    taken = pages.allocate(2)
    pages.release(taken[:1])
    with pytest.raises(AssertionError, match="not in use"):
        pages.release(taken)
    pages.check()
    assert pages.num_used == 1


def test_a_page_cannot_be_released_twice_at_once() -> None:
    pages = PageAllocator(3, 4)
    [page] = pages.allocate(1)
    with pytest.raises(AssertionError, match="not in use"):
        pages.release([page, page])
    pages.check()


def known(pages: PageAllocator, count: int) -> list[int]:
    """Pages that are held and that the index knows."""
    taken = pages.allocate(count)
    for page in taken:
        pages.index.add(page, content(page), VARIANT)
    return taken


def test_of_what_is_kept_the_longest_unused_sequence_goes_first_and_its_tail_before_its_head() -> None:
    pages = PageAllocator(7, 4)
    old, new = known(pages, 3), known(pages, 3)
    pages.release(old)
    pages.release(new)
    assert (pages.num_free, pages.num_kept) == (7, 6)
    pages.allocate(1)
    assert pages.num_evictions == 0
    assert [pages.allocate(1)[0] for _ in range(6)] == [*reversed(old), *reversed(new)]
    assert (pages.num_evictions, pages.num_kept, list(pages.index)) == (6, 0, [])


def test_a_page_that_is_used_again_is_the_last_to_go() -> None:
    pages = PageAllocator(2, 4)
    a, b = known(pages, 2)
    pages.release([a])
    pages.release([b])
    pages.share([a])
    assert (pages.num_kept, pages.holders(a)) == (1, 1)
    pages.release([a])
    assert pages.allocate(2) == [b, a]


def test_a_page_with_two_holders_is_free_when_both_have_released_it() -> None:
    pages = PageAllocator(2, 4)
    [page] = known(pages, 1)
    pages.share([page])
    assert pages.holders(page) == 2
    pages.release([page])
    assert (pages.holders(page), pages.num_used, pages.num_kept) == (1, 1, 0)
    pages.release([page])
    assert (pages.holders(page), pages.num_used, pages.num_kept) == (0, 0, 1)
    with pytest.raises(AssertionError, match="not in use"):
        pages.release([page])


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda pages: pages.index.forget(next(iter(pages._kept))), "kept that the index does not know"),
        (lambda pages: pages.index.add(pages._empty[0], content(99), VARIANT), "knows a page that is empty"),
        (lambda pages: pages._empty.append(pages._empty[0]), "free twice"),
        (lambda pages: pages._empty.pop(), r"3 free \+ 2 used pages are not 6"),
        (lambda pages: pages._empty.append(next(iter(pages._holders))), "both free and used"),
        (lambda pages: pages._empty.append(next(iter(pages._kept))), "both empty and kept"),
        (lambda pages: pages._holders.update({next(iter(pages._holders)): 0}), "no holder"),
    ],
)
def test_the_check_notices_what_is_wrong(broken: Callable[[PageAllocator], None], complaint: str) -> None:
    pages = PageAllocator(6, 4)
    known(pages, 1)
    pages.release(known(pages, 2)[1:])
    pages.check()
    broken(pages)
    with pytest.raises(AssertionError, match=complaint):
        pages.check()
