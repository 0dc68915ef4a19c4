"""Of the pages after a beginning the one that agrees longest with given tokens, whatever was added and removed."""

from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from service.cache.continuations import Continuations

TOKENS = st.tuples(*[st.integers(0, 2)] * 4)


def agreement(one: tuple[int, ...], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@settings(deadline=None, max_examples=300)
@given(
    pages=st.lists(st.tuples(st.sampled_from("ab"), TOKENS), max_size=20),
    removed=st.sets(st.integers(0, 19)),
    beginning=st.sampled_from("abc"),
    wanted=st.lists(st.integers(0, 3), max_size=6),
)
def test_the_longest_agreement_is_found(
    pages: list[tuple[str, tuple[int, ...]]], removed: set[int], beginning: str, wanted: list[int]
) -> None:
    continuations = Continuations()
    for page, (own, tokens) in enumerate(pages):
        continuations.add(own, tokens, page)
    for page in removed & set(range(len(pages))):
        continuations.remove(*pages[page], page)
    left = {
        page: agreement(tokens, wanted)
        for page, (own, tokens) in enumerate(pages)
        if own == beginning and page not in removed
    }
    found = continuations.find(beginning, wanted)
    most = max(left.values(), default=0)
    assert (found is None) == (most == 0)
    if found is not None:
        assert found.tokens == left[found.page] == most


def test_nothing_is_left_of_what_was_removed() -> None:
    continuations = Continuations()
    continuations.add("a", (1, 2), 0)
    continuations.remove("a", (1, 2), 0)
    assert not continuations._after
