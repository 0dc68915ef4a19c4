"""The index of pages: found by the same tokens computed the same way, and by nothing else."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model_patches.plan import PositionPlan
from service.cache.continuations import PartOfPage
from service.cache.prefix import CachedPage, Content, PrefixIndex, Variant, content_of, extend_digests, history_until
from service.core import Segment

PAGE_SIZE = 4


def plan(number: int) -> PositionPlan:
    return PositionPlan("yarn", 1.0 + number, 64, (1.0, 0.1 / (1 + number)), 1.0)


P0, P1, P2 = plan(0), plan(1), plan(2)


def digests_of(tokens: list[int], page_size: int = PAGE_SIZE) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, tokens, page_size)
    return digests


def contents_of(tokens: list[int], page_size: int = PAGE_SIZE) -> list[Content]:
    digests = digests_of(tokens, page_size)
    starts = range(0, len(tokens) - page_size + 1, page_size)
    return [content_of(digests, tokens[start : start + page_size], number) for number, start in enumerate(starts)]


def add_run(
    index: PrefixIndex, pages: list[int], contents: list[Content], history: list[Segment], rotated: PositionPlan
) -> None:
    """Make pages known, the first ones of a sequence with such a history."""
    for number, page in enumerate(pages):
        index.add(page, contents[number], Variant(history_until(history, (number + 1) * PAGE_SIZE), rotated))


# Digests


@given(tokens=st.lists(st.integers(0, 2**31), max_size=30), cut=st.integers(0, 30), page_size=st.integers(1, 7))
def test_digests_are_the_same_however_often_they_are_brought_up_to_date(
    tokens: list[int], cut: int, page_size: int
) -> None:
    digests = digests_of(tokens[:cut], page_size)
    assert len(digests) == len(tokens[:cut]) // page_size
    extend_digests(digests, tokens, page_size)
    assert digests == digests_of(tokens, page_size)
    extend_digests(digests, tokens, page_size)
    assert len(digests) == len(tokens) // page_size


TOKENS = st.lists(st.integers(0, 1), min_size=8, max_size=16)


@settings(deadline=None, max_examples=300)
@given(a=TOKENS, b=TOKENS)
def test_a_digest_is_of_all_tokens_up_to_the_end_of_its_page(a: list[int], b: list[int]) -> None:
    for number, (one, other) in enumerate(zip(digests_of(a), digests_of(b), strict=False)):
        end = (number + 1) * PAGE_SIZE
        assert (one == other) == (a[:end] == b[:end])


def test_tokens_that_share_bytes_do_not_share_digests() -> None:
    assert digests_of([1, 256, 0, 0]) != digests_of([256, 1, 0, 0])
    assert digests_of([0, 0, 0, 0]) != digests_of([0] * 8)[1:]


def test_a_history_ends_with_the_segment_that_holds_the_last_token() -> None:
    history = [Segment(0, P0), Segment(5, P1), Segment(8, P2)]
    kept = [len(history_until(history, end)) for end in (1, 5, 6, 8, 9, 99)]
    assert kept == [1, 1, 2, 2, 3, 3]


# find


@pytest.fixture
def index() -> PrefixIndex:
    """Pages 0 to 4 of one sequence: unscaled until 10, then under P1, all rotated under P1."""
    index = PrefixIndex(PAGE_SIZE)
    add_run(index, [0, 1, 2, 3, 4], CONTENTS, GROWN, P1)
    return index


DIGESTS = digests_of(list(range(20)))
CONTENTS = contents_of(list(range(20)))
GROWN = [Segment(0, P0), Segment(10, P1)]


def test_a_run_is_found_as_far_as_it_goes(index: PrefixIndex) -> None:
    assert index.find(DIGESTS, GROWN, P1) == [0, 1, 2, 3, 4]
    assert index.find(DIGESTS[:3], GROWN, P1) == [0, 1, 2]
    assert index.find([], GROWN, P1) == []
    other_tokens = digests_of([*range(9), 99, *range(10, 20)])
    assert index.find(other_tokens, GROWN, P1) == [0, 1]


@pytest.mark.parametrize(
    ("history", "rotated", "found"),
    [
        ([Segment(0, P0)], P1, [0, 1]),  # the first ten tokens were computed like that
        ([Segment(0, P0), Segment(8, P1)], P1, [0, 1]),
        ([Segment(0, P0), Segment(12, P1)], P1, [0, 1]),
        ([Segment(0, P0), Segment(10, P2)], P1, [0, 1]),
        ([Segment(0, P0), Segment(10, P1), Segment(16, P2)], P1, [0, 1, 2, 3]),
        ([Segment(0, P1)], P1, []),  # re-rotated pages hold hidden states of another plan
        ([Segment(0, P0)], P0, []),
        (GROWN, P0, []),
        (GROWN, P2, []),
        (GROWN, replace(P1, scheme="other name", max_length=9), [0, 1, 2, 3, 4]),
    ],
)
def test_nothing_is_found_that_was_computed_or_is_rotated_otherwise(
    index: PrefixIndex, history: list[Segment], rotated: PositionPlan, found: list[int]
) -> None:
    assert index.find(DIGESTS, history, rotated) == found


def test_a_page_that_was_forgotten_ends_the_run_until_an_equal_one_is_added(index: PrefixIndex) -> None:
    index.forget(2)
    assert 2 not in index
    assert sorted(index) == [0, 1, 3, 4]
    assert index.find(DIGESTS, GROWN, P1) == [0, 1]
    index.add(9, CONTENTS[2], Variant(tuple(GROWN), P1))
    assert index.find(DIGESTS, GROWN, P1) == [0, 1, 9, 3, 4]


def test_of_two_equal_pages_the_first_is_known_and_the_second_stays_unknown(index: PrefixIndex) -> None:
    index.add(9, CONTENTS[2], Variant(tuple(GROWN), P1))
    assert 9 not in index
    index.forget(2)
    assert index.find(DIGESTS, GROWN, P1) == [0, 1]


# find_any


def test_pages_of_any_history_and_rotation_are_found(index: PrefixIndex) -> None:
    pages, history = index.find_any(DIGESTS, P2)
    assert pages == [CachedPage(page, P1) for page in range(5)]
    assert history == tuple(GROWN)
    pages, history = index.find_any(DIGESTS[:2], P2)
    assert (pages, history) == ([CachedPage(0, P1), CachedPage(1, P1)], (Segment(0, P0),))
    assert index.find_any(digests_of([5, 5, 5, 5]), P0) == ([], ())
    assert index.find_any([], P0) == ([], ())


def test_the_longest_run_is_found_then_the_one_with_most_pages_under_the_wanted_plan(index: PrefixIndex) -> None:
    add_run(index, [10, 11, 12], CONTENTS, [Segment(0, P2)], P2)
    assert [cached.page for cached in index.find_any(DIGESTS, P2)[0]] == [0, 1, 2, 3, 4]
    assert index.find_any(DIGESTS[:3], P2) == ([CachedPage(page, P2) for page in (10, 11, 12)], (Segment(0, P2),))
    assert [cached.page for cached in index.find_any(DIGESTS[:3], P1)[0]] == [0, 1, 2]


def test_of_pages_that_went_through_the_same_the_one_under_the_wanted_plan_is_taken(index: PrefixIndex) -> None:
    index.add(10, CONTENTS[0], Variant((Segment(0, P0),), P0))
    index.add(11, CONTENTS[2], Variant(tuple(GROWN), P2))
    assert [cached.page for cached in index.find_any(DIGESTS, P0)[0]] == [10, 1, 2, 3, 4]
    assert [cached.page for cached in index.find_any(DIGESTS, P2)[0]] == [0, 1, 11, 3, 4]
    assert [cached.page for cached in index.find_any(DIGESTS, P1)[0]] == [0, 1, 2, 3, 4]


def test_a_run_does_not_go_on_with_a_page_whose_past_was_computed_otherwise() -> None:
    index = PrefixIndex(PAGE_SIZE)
    # Two sequences: one unscaled for eight tokens, one that moved to P1 in the middle of its first page.
    add_run(index, [0, 1], CONTENTS, [Segment(0, P0)], P0)
    late = [Segment(0, P0), Segment(2, P1)]
    add_run(index, [2, 3, 4], CONTENTS, late, P1)
    assert index.find_any(DIGESTS, P2) == ([CachedPage(page, P1) for page in (2, 3, 4)], tuple(late))
    index.forget(2)
    assert index.find_any(DIGESTS, P2) == ([CachedPage(page, P0) for page in (0, 1)], (Segment(0, P0),))


def test_pages_of_another_group_of_layers_are_others() -> None:
    index, [first, second] = PrefixIndex(PAGE_SIZE), CONTENTS[:2]
    one, other = plan(1), plan(2)
    past = (Segment(0, one),)
    for page, variant in enumerate([Variant(past, one), Variant(past, one, 1), Variant(past, other, 1)]):
        index.add(page, first, variant)
    index.add(3, second, Variant(past, one, 2))
    digests = DIGESTS[:2]
    assert index.find(digests, past, one) == [0]
    assert index.find_any(digests, other) == ([CachedPage(0, one)], past)
    assert index.find_each(digests, past, other, 1) == [2, None]
    assert index.find_each(digests, past, one, 2) == [None, 3]
    assert index.find_each_rotated(digests, past, other, 1) == [CachedPage(2, other), None]
    assert index.find_each_rotated(digests, past, one, 1) == [CachedPage(1, one), None]
    assert index.find_each_rotated(digests, (Segment(0, other),), one, 1) == [None, None]


# find_part


@pytest.mark.parametrize(
    ("before", "tokens", "history", "rotated", "group", "found"),
    [
        (DIGESTS[1], [8, 9, 0], GROWN, P1, 0, PartOfPage(2, 2)),
        (DIGESTS[1], [8, 9, 10], GROWN, P1, 0, PartOfPage(2, 3)),
        (b"", [0], [Segment(0, P0)], P1, 0, PartOfPage(0, 1)),
        (DIGESTS[1], [9, 9], GROWN, P1, 0, None),
        (DIGESTS[1], [], GROWN, P1, 0, None),
        (DIGESTS[0], [8, 9], GROWN, P1, 0, None),  # after another beginning
        (DIGESTS[1], [8, 9], [Segment(0, P0)], P1, 0, None),  # computed otherwise, in its second half
        (DIGESTS[1], [8, 9], GROWN, P0, 0, None),
        (DIGESTS[1], [8, 9], GROWN, P1, 1, None),
    ],
)
def test_a_part_of_a_page_is_found_after_the_same_beginning_in_the_same_variant(
    index: PrefixIndex,
    before: bytes,
    tokens: list[int],
    history: list[Segment],
    rotated: PositionPlan,
    group: int,
    found: PartOfPage | None,
) -> None:
    assert index.find_part(before, tokens, Variant(tuple(history), rotated, group)) == found


def test_no_part_is_found_of_a_page_that_was_forgotten_nor_of_one_that_stayed_unknown(index: PrefixIndex) -> None:
    variant = Variant(tuple(GROWN), P1)
    index.add(9, CONTENTS[2], variant)  # an equal one is known
    index.forget(2)
    assert index.find_part(DIGESTS[1], [8, 9], variant) is None
    index.add(9, CONTENTS[2], variant)
    assert index.find_part(DIGESTS[1], [8, 9], variant) == PartOfPage(9, 2)


class IndexMachine(RuleBasedStateMachine):
    """Pages of random sequences are added and forgotten; a plain list remembers what each of them is."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(2)
        self.known: dict[int, tuple[list[int], tuple[Segment, ...], PositionPlan]] = {}
        self.num_added = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8),
        starts=st.lists(st.integers(1, 7), max_size=2, unique=True),
        plans=st.permutations([P0, P1, P2]),
        rotated=st.integers(0, 2),
    )
    def add_a_sequence(self, tokens: list[int], starts: list[int], plans: list[PositionPlan], rotated: int) -> None:
        history = [Segment(start, own) for start, own in zip([0, *sorted(starts)], plans, strict=False)]
        for number, content in enumerate(contents_of(tokens, 2)):
            end = 2 * (number + 1)
            new = (tokens[:end], history_until(history, end), plans[rotated])
            self.index.add(self.num_added, content, Variant(new[1], new[2]))
            assert (self.num_added in self.index) == (new not in self.known.values())
            if self.num_added in self.index:
                self.known[self.num_added] = new
            self.num_added += 1

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.known)))
        self.index.forget(page)
        del self.known[page]

    @rule(
        tokens=st.lists(st.integers(0, 1), max_size=8),
        starts=st.lists(st.integers(1, 7), max_size=2, unique=True),
        plans=st.permutations([P0, P1, P2]),
        rotated=st.sampled_from([P0, P1, P2]),
    )
    def find(self, tokens: list[int], starts: list[int], plans: list[PositionPlan], rotated: PositionPlan) -> None:
        history = [Segment(start, own) for start, own in zip([0, *sorted(starts)], plans, strict=False)]
        expected: list[int] = []
        for end in range(2, len(tokens) + 1, 2):
            wanted = (tokens[:end], history_until(history, end), rotated)
            fitting = [page for page, known in self.known.items() if known == wanted]
            if not fitting:
                break
            expected += fitting
        assert self.index.find(digests_of(tokens, 2), history, rotated) == expected

    @rule(tokens=st.lists(st.integers(0, 1), max_size=8), wanted=st.sampled_from([P0, P1, P2]))
    def find_any(self, tokens: list[int], wanted: PositionPlan) -> None:
        pages, history = self.index.find_any(digests_of(tokens, 2), wanted)
        for number, (page, rotated) in enumerate(pages):
            end = 2 * (number + 1)
            assert self.known[page] == (tokens[:end], history_until(history, end), rotated)
        assert len(pages) == self.longest(tokens)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8), variant=st.integers(0, 99))
    def find_part(self, tokens: list[int], variant: int) -> None:
        variants = sorted({known[1:] for known in self.known.values()}, key=repr)
        if not variants:
            return
        past, rotated = variants[variant % len(variants)]
        start = (len(tokens) - 1) // 2 * 2
        digests = digests_of(tokens[:start], 2)
        found = self.index.find_part(digests[-1] if digests else b"", tokens[start:], Variant(past, rotated))
        parts = {
            page: 1 + (known[0] == tokens)
            for page, known in self.known.items()
            if known[1:] == (past, rotated)
            and len(known[0]) == start + 2
            and known[0][: start + 1] == tokens[: start + 1]
        }
        assert (found is None) == (not parts)
        if found is not None:
            assert found.tokens == parts[found.page] == max(parts.values())

    def longest(self, tokens: list[int]) -> int:
        """How many pages from the first went through one history."""
        candidates = [known[1] for known in self.known.values()]
        runs = [0]
        for history in candidates:
            count = 0
            while any(
                known[:2] == (tokens[: 2 * count + 2], history_until(history, 2 * count + 2))
                for known in self.known.values()
                if 2 * count + 2 <= len(tokens)
            ):
                count += 1
            runs.append(count)
        return max(runs)

    @invariant()
    def what_is_known_is_what_was_added_and_not_forgotten(self) -> None:
        assert sorted(self.index) == sorted(self.known)
        assert all(page in self.index for page in self.known)
        for history in (known[1] for known in self.known.values()):
            assert all(before.start < after.start for before, after in pairwise(history))


IndexMachine.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=20)
TestIndex = IndexMachine.TestCase
