"""The allocator: whatever is asked of it, no page is lost, doubled or handed out twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.cache.pages import PageAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """Allocates and releases at random, and remembers who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(0, 1)
        self.held: list[list[int]] = []

    @initialize(num_pages=st.integers(0, 12))
    def make(self, num_pages: int) -> None:
        self.pages = PageAllocator(num_pages, 4)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pages.num_free))
        taken = self.pages.allocate(count)
        assert len(taken) == count
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_some_of_one_holder(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(range(len(self.held))))
        pages = self.held.pop(holder)
        kept = data.draw(st.integers(0, len(pages)))
        self.pages.release(pages[kept:])
        self.held.append(pages[:kept])

    @invariant()
    def no_page_has_two_holders_and_all_others_are_free(self) -> None:
        held = [page for pages in self.held for page in pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(self.pages.num_pages))
        assert self.pages.num_used == len(held)
        assert self.pages.num_free == self.pages.num_pages - len(held)
        self.pages.check()

    def teardown(self) -> None:
        for pages in self.held:
            self.pages.release(pages)
        assert sorted(self.pages.allocate(self.pages.num_pages)) == list(range(self.pages.num_pages))


AllocatorMachine.TestCase.settings = settings(deadline=None)
TestAllocator = AllocatorMachine.TestCase


@settings(deadline=None)
@given(tokens=st.integers(0, 10**6), page_size=st.integers(1, 512))
def test_pages_for_is_the_least_number_that_holds_the_tokens(tokens: int, page_size: int) -> None:
    count = PageAllocator(1, page_size).pages_for(tokens)
    assert count * page_size >= tokens
    assert count == 0 or (count - 1) * page_size < tokens


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


def test_the_check_notices_a_page_that_was_released_twice_at_once() -> None:
    pages = PageAllocator(3, 4)
    [page] = pages.allocate(1)
    pages.release([page, page])
    with pytest.raises(AssertionError, match="free twice"):
        pages.check()
