"""Layers that see a window only: which pages are given back, what is still found, and that nothing alive is touched."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import SamplingParams, Sequence
from service.scaling.policy import RopeWish
from tests.fakes import PAGE_SIZE
from tests.service.growing import POLICY, answer, expected_growing
from tests.service.windowed import WindowedLoad, Windows

PROMPT = list(range(20, 36))  # four full pages
STATIC = RopeWish(factor=4.0)  # no growth
ANY_PLAN = RopeWish(factor=4.0, prefix_reuse="rerotate")


def assert_as_its_history(sequence: Sequence) -> None:
    for count, token in enumerate(sequence.output):
        assert token == answer(sequence.tokens(0, len(sequence.prompt) + count), sequence.history)


@pytest.mark.parametrize("chunk", [3, 5, 16])
def test_a_windowed_group_holds_its_window_and_a_step_whatever_the_length(chunk: int) -> None:
    load = WindowedLoad(max_running=1, max_batch_tokens=chunk, windows=(None, 6, 11))
    sequence = load.add("long", list(range(30)), max_tokens=10, wish=STATIC)
    most = [0, 0, 0]
    while load.live:
        load.step()
        held = load.held(sequence) or most
        most = [max(pair) for pair in zip(most, held, strict=True)]
        assert sum(held) <= load.scheduler.needs.most(40)
    assert most[0] == 10
    for pages, window in zip(most[1:], (6, 11), strict=True):
        assert pages <= (window + chunk) / PAGE_SIZE + 2
    assert sequence.output == expected_growing(sequence.prompt, 10, sequence.choice)


def test_while_decoding_only_the_window_is_held() -> None:
    load = WindowedLoad(windows=(None, 6))
    sequence = load.add("a", PROMPT, max_tokens=20, wish=STATIC)
    held = []
    while load.live:
        load.step()
        held += [load.held(sequence)] if sequence in load.live else []
    # Of 6 tokens, the next one's own place included, at most three pages hold some.
    assert max(windowed for _, windowed in held[1:]) <= 3
    assert held[-1][0] == 9


def test_a_model_of_windows_alone_gives_back_too() -> None:
    load = WindowedLoad(num_pages=8, max_batch_tokens=8, windows=(6,))
    # 39 tokens would take 10 pages.
    sequence = load.add("a", PROMPT, max_tokens=23, wish=STATIC)
    load.run()
    assert load.scheduler.num_preemptions == 0
    assert sequence.output == expected_growing(PROMPT, 23, sequence.choice)


def test_a_prefix_needs_all_of_the_global_pages_and_the_window_of_the_others() -> None:
    load = WindowedLoad(windows=(None, 6))
    load.add("first", PROMPT, wish=STATIC)
    load.run()
    second = load.add("second", [*PROMPT, 1], wish=STATIC)
    load.step()
    assert second.num_prefix_tokens == 16
    windowed = [page for page in load.pages.index if load.pages.index._keys[page][1].group == 1]
    by_digest = {load.pages.index._keys[page][0].digest: page for page in windowed}
    # Without the second page it is found still: the seventeenth token sees places 11 to 16.
    pages = [by_digest[digest] for digest in second.page_digests[:4]]
    forget(load, pages[1])
    third = load.add("third", [*PROMPT, 2], wish=STATIC)
    load.step()
    assert third.num_prefix_tokens == 16
    # Without the third no longer: the first page alone is one that a sequence can start with.
    forget(load, pages[2])
    fourth = load.add("fourth", [*PROMPT, 3], wish=STATIC)
    load.step()
    assert fourth.num_prefix_tokens == 4


def forget(load: WindowedLoad, page: int) -> None:
    """As if it had been evicted."""
    load.pages.index.forget(page)
    load.pages._kept.pop(page)
    load.pages._empty.append(page)


def test_a_prefix_takes_no_windowed_pages_that_nobody_will_read() -> None:
    load = WindowedLoad(windows=(None, 6))
    load.add("first", PROMPT, wish=STATIC)
    load.run()
    second = load.add("second", [*PROMPT, 1], max_tokens=2, wish=STATIC)
    load.step()
    assert [(table.first, table.end) for table in second.tables] == [(0, 5), (2, 5)]
    load.run()
    assert_as_its_history(second)


def test_only_live_pages_move_when_a_sequence_grows() -> None:
    load = WindowedLoad(windows=(None, 6))
    sequence = load.add("a", PROMPT[:8], max_tokens=30)
    numbers = [
        [[move.number for move in rerotation.moves if move.group == group] for group in (0, 1)]
        for step in load.run()
        for rerotation in step.rerotations
    ]
    assert numbers[2] == [[0, 1, 2, 3], [2, 3]]  # at 15 tokens; the next sees 10 to 15
    assert sequence.num_rerotations == 6
    assert sequence.output == expected_growing(sequence.prompt, 30, sequence.choice)


@pytest.mark.parametrize("refresh_tokens", [1, 3, 7])
def test_tokens_that_are_computed_again_find_their_window(refresh_tokens: int) -> None:
    load = WindowedLoad(windows=(None, 3), refresh_tokens=refresh_tokens)
    sequence = load.add("a", PROMPT[:8], max_tokens=30)
    load.run()
    assert sequence.output == expected_growing(sequence.prompt, 30, sequence.choice, refresh_tokens)


def test_pages_of_other_plans_are_copied_in_every_group() -> None:
    load = WindowedLoad(windows=(None, 6))
    load.add("first", PROMPT[:9])
    load.run()
    before = set(load.pages.index)
    second = load.add("second", [*PROMPT[:8], 1], max_tokens=3, wish=ANY_PLAN)
    [rerotation] = load.step().rerotations
    assert {(move.group, move.number) for move in rerotation.moves} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert before <= set(load.pages.index)
    load.run()
    assert (second.num_prefix_tokens, second.num_other_plan_prefix_tokens) == (8, 8)
    assert_as_its_history(second)


def test_a_part_of_a_page_is_copied_in_every_group_or_in_none() -> None:
    load = WindowedLoad(windows=(None, 6))
    load.add("first", PROMPT, wish=STATIC)
    load.run()
    second = load.add("second", [*PROMPT[:14], 1, 1], max_tokens=4, wish=STATIC)
    [copy] = load.step().copies
    assert copy.tokens == 2
    assert list(copy.targets) == [table.pages[3 - table.first] for table in second.tables]
    assert second.num_prefix_tokens == 14
    load.run()
    # Without the windowed page of that number it is found up to the page before.
    forget(load, copy.sources[1])
    third = load.add("third", [*PROMPT[:14], 2, 2], max_tokens=4, wish=STATIC)
    fourth = load.add("fourth", [*PROMPT[:14], 1, 1, 1], max_tokens=4, wish=STATIC)
    load.run()
    assert (third.num_prefix_tokens, fourth.num_prefix_tokens) == (14, 16)  # of the second's copy
    assert_as_its_history(second)
    assert_as_its_history(third)


def test_a_draft_takes_no_more_pages_than_are_free_in_all_groups() -> None:
    load = WindowedLoad(num_pages=14, windows=(None, 6))
    sequence = load.add("a", PROMPT[:5], max_tokens=20, wish=STATIC)
    load.step()
    load.step()
    # Nothing is behind the window yet.
    held = load.pages.allocate(load.pages.num_free - 1)  # one page: not enough for both groups
    sequence.draft = [1] * 10
    load.scheduler.schedule()
    assert sequence.num_tokens + len(sequence.draft) == sequence.num_placed == 8
    load.pages.release(held)


@settings(deadline=None, max_examples=150)
@given(
    windows=st.sampled_from([(None, 6), (None, 3, 9), (5,), (None, None, 4), (1, 8)]),
    actions=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 10), st.sampled_from([None, STATIC, ANY_PLAN]), st.integers(0, 3))
        | st.floats(0, 1),
        max_size=12,
    ),
    spare_pages=st.integers(0, 30),
    chunk=st.integers(4, 20),
    refresh_tokens=st.sampled_from([0, 3]),
)
def test_whatever_happens_no_live_page_is_lost_shared_pages_are_not_written_and_all_return(
    windows: Windows,
    actions: list[tuple[int, int, RopeWish | None, int] | float],
    spare_pages: int,
    chunk: int,
    refresh_tokens: int,
) -> None:
    load = WindowedLoad(
        num_pages=10 * len(windows) + spare_pages,
        max_running=4,
        max_batch_tokens=chunk,
        refresh_tokens=refresh_tokens,
        windows=windows,
    )
    done = []
    for number, action in enumerate(actions):
        if isinstance(action, float):
            if load.live:
                load.remove(load.live[int(action * (len(load.live) - 1))])
        else:
            length, max_tokens, wish, same = action
            prompt = [*range(20, 20 + length - same), *[number] * same][:length]
            if POLICY.choose(len(prompt), max_tokens, wish) and len(prompt) + max_tokens <= 40:
                done.append(load.add(str(number), prompt, max_tokens, wish))
        for _ in range(2):
            load.step()
            load.check_holders()
    load.run()
    for sequence in done:
        if sequence.num_rerotations:
            expected = expected_growing(sequence.prompt, len(sequence.output), sequence.choice, refresh_tokens)
            assert sequence.output == expected
        else:
            assert_as_its_history(sequence)


def test_sequences_that_do_not_fit_at_once_give_way_and_come_back() -> None:
    load = WindowedLoad(num_pages=20, max_batch_tokens=16, windows=(None, 6))
    sequences = [load.add(name, [*PROMPT, ord(name)], max_tokens=20, wish=STATIC) for name in "abc"]
    load.run()
    assert load.scheduler.num_preemptions > 0
    for sequence in sequences:
        assert sequence.output == expected_growing(sequence.prompt, 20, sequence.choice)


def test_a_sequence_that_never_fits_is_not_taken() -> None:
    load = WindowedLoad(num_pages=12, max_running=1, max_batch_tokens=4, windows=(None, 6))
    assert load.scheduler.needs.most(40) == 13
    choice = POLICY.choose(20, 20, STATIC)
    with pytest.raises(AssertionError):
        load.scheduler.add(Sequence("a", [0] * 20, choice, SamplingParams(20), deliver=lambda _: None))
