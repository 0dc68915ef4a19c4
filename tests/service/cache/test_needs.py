"""Which pages each group needs, against windows counted token by token."""

from hypothesis import given, settings
from hypothesis import strategies as st

from service.cache.needs import PageNeeds

WINDOWS = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4)


@settings(deadline=None)
@given(tokens=st.integers(0, 10**6), page_size=st.integers(1, 512))
def test_pages_for_is_the_least_number_that_holds_the_tokens(tokens: int, page_size: int) -> None:
    count = PageNeeds(page_size).pages_for(tokens)
    assert count * page_size >= tokens
    assert count == 0 or (count - 1) * page_size < tokens


@settings(deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 4, 16]),
    windows=WINDOWS,
    chunk=st.integers(1, 30),
    refresh=st.integers(0, 5),
    computed=st.integers(0, 100),
    more=st.integers(1, 100),
)
def test_what_a_step_sees_and_writes_is_held_and_hardly_more(
    page_size: int, windows: list[int | None], chunk: int, refresh: int, computed: int, more: int
) -> None:
    needs = PageNeeds(page_size, windows, max_batch_tokens=chunk, refresh_tokens=refresh)
    known, held = computed + more, 0
    step = min(chunk, more)
    for group, window in enumerate(windows):
        first = needs.first(group, computed)
        end = needs.end(group, first, known)
        held += end - first
        oldest = 0 if window is None else max(0, computed - refresh - window + 1)
        assert first == oldest // page_size
        assert end * page_size >= computed + step
        if window is None:
            assert end == -(-known // page_size)
        else:
            assert end - first <= (window + refresh + chunk) / page_size + 2
    assert held <= needs.most(known)
    assert needs.has_windows == any(window is not None for window in windows)


def test_the_most_is_reached() -> None:
    needs = PageNeeds(4, (None, 6), max_batch_tokens=8)
    held = []
    for computed in range(60):
        firsts = [needs.first(group, computed) for group in range(2)]
        held.append(sum(needs.end(group, first, 100) - first for group, first in enumerate(firsts)))
    assert max(held) == needs.most(100) == 25 + 4


def test_of_one_group_that_sees_all_as_many_sequences_fit_as_pages_allow() -> None:
    assert PageNeeds(16).sequences(100, 800) == 2.0
    assert PageNeeds(16).most(801) == 51
    assert [PageNeeds(16).tokens(pages, 801) for pages in (0, 7, 100)] == [0, 112, 1600]
    # 800 tokens are 50 pages; 19 + 64 tokens, wherever they begin, are in 7 at most.
    assert PageNeeds(16, (None, 20), max_batch_tokens=64).sequences(114, 800) == 2.0


@settings(deadline=None)
@given(
    windows=WINDOWS,
    found=st.lists(st.lists(st.none() | st.just(1), max_size=12), min_size=4, max_size=4),
    page_size=st.sampled_from([1, 4]),
)
def test_the_longest_prefix_has_all_that_the_token_after_it_sees(
    windows: list[int | None], found: list[list[int | None]], page_size: int
) -> None:
    found = found[: len(windows)]

    def reaches(pages: list[int | None], window: int | None, count: int) -> bool:
        after = count * page_size
        seen = range(0 if window is None else max(0, after - window + 1), after)
        return count <= len(pages) and all(pages[place // page_size] is not None for place in seen)

    lengths = [
        count
        for count in range(13)
        if all(reaches(pages, window, count) for pages, window in zip(found, windows, strict=True))
    ]
    assert PageNeeds(page_size, windows).longest_prefix(found) == max(lengths)
