"""Growth: when a sequence changes its plan, what moves with it, and how it goes the same way again."""

from collections.abc import Sequence as Many

import pytest

from service.cache.prefix import Variant
from service.core import PageMove, Rerotation, Segment, Sequence
from service.scaling.policy import Growth, RopeWish
from tests.service.growing import NATIVE_LENGTH, POLICY, REPREFILL, Load, Step, expected_growing, history_at

PROMPT = list(range(20, 28))  # two full pages
RUNGS = [10, 12, 15, 20, 25, 30, 40]


def grown(steps: Many[Step]) -> list[Rerotation]:
    return [rerotation for step in steps for rerotation in step.rerotations]


def assert_as_alone(sequence: Sequence, refresh_tokens: int = 0) -> None:
    count = sequence.sampling.max_tokens
    assert sequence.output == expected_growing(sequence.prompt, count, sequence.choice, refresh_tokens)


def test_the_ladder_of_these_tests_has_rungs_of_different_rotation() -> None:
    rungs = POLICY.choose(1, 39).rungs
    assert [rung.max_length for rung in rungs] == RUNGS
    assert len(set(rungs)) == len(RUNGS)


# When


def test_a_sequence_grows_after_the_last_token_that_its_plan_covers_one_rung_at_a_time() -> None:
    load = Load()
    sequence = load.add("a", PROMPT, max_tokens=32)
    computed = []
    while load.live:
        before = sequence.plan
        known = sequence.num_computed
        if load.step().rerotations:
            computed.append(known)
            assert sequence.num_computed == known + 1 or sequence not in load.live
            assert before.max_length == known
        if sequence in load.live:
            assert sequence.plan == next(rung for rung in sequence.choice.rungs if rung.max_length >= known + 1)
    assert computed == RUNGS[:-1]
    assert sequence.num_rerotations == len(RUNGS) - 1
    assert_as_alone(sequence)


@pytest.mark.parametrize(("max_tokens", "rerotations"), [(2, 0), (3, 0), (4, 1), (5, 1), (6, 2)])
def test_a_sequence_does_not_grow_for_a_token_that_is_never_computed(max_tokens: int, rerotations: int) -> None:
    load = Load()
    sequence = load.add("a", PROMPT, max_tokens)
    # The last token is not computed: the plan of 10 tokens serves 11.
    assert len(grown(load.run())) == rerotations == sequence.num_rerotations
    assert_as_alone(sequence)


def test_a_prompt_as_long_as_the_plan_is_computed_under_it() -> None:
    load = Load()
    sequence = load.add("a", list(range(NATIVE_LENGTH)), max_tokens=2)
    assert sequence.choice.mode == "dynamic"
    first, second = load.run()
    assert (first.tokens, first.rerotations) == ({"a": 10}, [])
    assert (second.tokens, len(second.rerotations)) == ({"a": 1}, 1)


def test_a_static_plan_grows_too_and_growth_stop_never_does() -> None:
    load = Load()
    static = load.add("static", PROMPT, max_tokens=20, wish=RopeWish(factor=1.5, growth="rerotate"))
    stop = load.add("stop", PROMPT, max_tokens=2, wish=RopeWish(growth="stop"))
    moved = grown(load.run())
    assert [(rerotation.old.max_length, rerotation.new.max_length) for rerotation in moved] == [
        (15, 20),
        (20, 25),
        (25, 30),
    ]
    assert {rerotation.sequence for rerotation in moved} == {static}
    assert (static.num_rerotations, stop.num_rerotations) == (3, 0)


def test_others_decode_in_the_step_before_and_after() -> None:
    load = Load()
    load.add("beside", [1, 2], max_tokens=7)
    load.add("growing", PROMPT, max_tokens=7)
    steps = load.run()
    assert [len(step.rerotations) for step in steps] == [0, 0, 0, 1, 0, 1, 0]
    assert all(set(step.tokens) == {"beside", "growing"} for step in steps)


# What moves


def test_all_pages_with_computed_tokens_move_in_place_where_there_is_no_room_for_copies() -> None:
    load = Load(num_pages=5)
    sequence = load.add("a", PROMPT, max_tokens=5)
    load.run_until(sequence, NATIVE_LENGTH)
    held = list(sequence.tables[0].pages)
    [rerotation] = load.step().rerotations
    assert rerotation.sequence is sequence
    assert (rerotation.old, rerotation.new) == sequence.choice.rungs[:2]
    assert rerotation.tokens == NATIVE_LENGTH
    assert rerotation.moves == [PageMove(page, page, number) for number, page in enumerate(held)]
    assert list(sequence.tables[0].pages[:3]) == held


@pytest.mark.parametrize(("num_pages", "kept"), [(6, True), (5, False)])
def test_what_begins_alike_is_still_found_after_growth_where_there_is_room(num_pages: int, kept: bool) -> None:
    load = Load(num_pages=num_pages)
    grown = load.add("grown", PROMPT, max_tokens=8)
    load.run_until(grown, NATIVE_LENGTH + 1)
    load.remove(grown)
    again = load.add("again", PROMPT)
    load.step()
    assert again.num_prefix_tokens == (7 if kept else 0)  # of eight tokens one at least is computed


def shared_growth(load: Load) -> tuple[Sequence, Sequence]:
    """Two sequences that share their first two pages; the first is about to grow."""
    first = load.add("first", [*PROMPT, 1], max_tokens=12)
    load.step()
    second = load.add("second", [*PROMPT, 2], max_tokens=12)
    load.run_until(first, NATIVE_LENGTH)
    assert first.tables[0].pages[:2] == second.tables[0].pages[:2]
    return first, second


def test_pages_that_others_hold_are_copied_whatever_the_room_and_only_those() -> None:
    load = Load(num_pages=7)
    first, second = shared_growth(load)
    before = list(first.tables[0].pages)
    assert second.num_computed < NATIVE_LENGTH
    load.scheduler.schedule()
    mine = next(each for each in load.scheduler.take_preparations() if each.sequence is first)
    assert isinstance(mine, Rerotation)
    assert [(move.source, move.number) for move in mine.moves] == [(page, n) for n, page in enumerate(before)]
    copied = [move.source != move.target for move in mine.moves]
    assert copied == [True, True, False]
    assert not {move.target for move in mine.moves[:2]} & set(before)


def test_what_was_shared_stays_as_it_is_for_the_others() -> None:
    load = Load()
    first, second = shared_growth(load)
    load.run()
    assert_as_alone(first)
    assert_as_alone(second)


def test_of_two_that_grow_in_one_step_the_first_copies_and_the_second_moves_in_place() -> None:
    load = Load(num_pages=7)
    load.add("seed", PROMPT)
    load.run()
    first = load.add("first", [*PROMPT, 1], max_tokens=4)
    second = load.add("second", [*PROMPT, 2], max_tokens=4)
    load.run_until(first, NATIVE_LENGTH)
    assert second.num_computed == NATIVE_LENGTH
    shared = list(first.tables[0].pages[:2])
    assert list(second.tables[0].pages[:2]) == shared
    one, other = load.step().rerotations
    assert [move.source for move in one.moves[:2]] == shared
    assert not {move.target for move in one.moves} & set(shared)
    assert [(move.source, move.target) for move in other.moves[:2]] == [(page, page) for page in shared]
    load.run()
    assert_as_alone(first)
    assert_as_alone(second)


def test_moved_pages_leave_the_index_and_return_to_it_under_their_history() -> None:
    load = Load(num_pages=5)
    sequence = load.add("a", PROMPT, max_tokens=12)
    load.run_until(sequence, NATIVE_LENGTH)
    unscaled, scaled = sequence.choice.rungs[:2]
    digests = sequence.page_digests
    find, history = load.pages.index.find, [Segment(0, unscaled)]
    assert find(digests[:2], history, unscaled) == list(sequence.tables[0].pages[:2])

    load.scheduler.schedule()
    [rerotation] = load.scheduler.take_preparations()
    assert isinstance(rerotation, Rerotation)
    assert list(load.pages.index) == []
    load.runner.rerotate(rerotation)
    load.scheduler.complete({sequence: 1})
    sequence.output.append(1)

    assert find(digests[:2], history, unscaled) == []
    assert find(digests[:2], [Segment(0, scaled)], scaled) == []
    assert find(digests[:2], history, scaled) == list(sequence.tables[0].pages[:2])
    load.scheduler.complete({sequence: 1})
    grown = [Segment(0, unscaled), Segment(NATIVE_LENGTH, scaled)]
    assert find(digests, grown, scaled) == list(sequence.tables[0].pages)


def test_a_request_that_starts_under_the_grown_plan_does_not_find_what_was_computed_under_the_first() -> None:
    load = Load()
    first = load.add("first", PROMPT, max_tokens=8)
    load.run()
    static = load.add("static", [*PROMPT, *first.output[:4]], max_tokens=2, wish=RopeWish(factor=1.5))
    load.run()
    assert static.num_prefix_tokens == 0
    assert_as_alone(static)


# Again the same way


@pytest.mark.parametrize("refresh_tokens", [0, 1, 4, 6])
@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_what_was_preempted_goes_through_the_same_history_again(
    refresh_tokens: int, budget: int, prefix_caching: bool
) -> None:
    load = Load(max_running=3, max_batch_tokens=budget, refresh_tokens=refresh_tokens, prefix_caching=prefix_caching)
    sequence = load.add("a", PROMPT, max_tokens=20)
    while sequence.num_computed < 22:
        load.step()
    history, output = list(sequence.history), list(sequence.output)
    load.scheduler._preempt_youngest({})
    assert (sequence.stage, sequence.num_computed, sequence.tables) == (0, 0, [])
    replayed = []
    while sequence.num_computed < 22:
        step = load.step()
        replayed += [(sequence.history[sequence.stage].start, rerotation.new) for rerotation in step.rerotations]
        assert sequence.output[: len(output)] == output
    if not prefix_caching:
        assert replayed == [(segment.start, segment.plan) for segment in history[1:]]
    assert sequence.history == history == history_at(sequence.choice, 23, refresh_tokens)
    load.run()
    assert_as_alone(sequence, refresh_tokens)
    assert sequence.num_rerotations == 5  # beyond 10, 12, 15, 20 and 25: of its 28 tokens 27 are computed


def test_a_chunk_of_a_replay_never_crosses_a_boundary() -> None:
    load = Load(prefix_caching=False)
    sequence = load.add("a", PROMPT, max_tokens=20)
    load.run_until(sequence, 22)
    load.scheduler._preempt_youngest({})
    steps = [load.step() for _ in range(5)]
    assert [step.tokens["a"] for step in steps] == [10, 2, 3, 5, 3]
    assert [len(step.rerotations) for step in steps] == [0, 1, 1, 1, 1]
    load.run()
    assert_as_alone(sequence)


@pytest.mark.parametrize("pages_left", range(7))
def test_a_replay_starts_with_as_much_of_its_history_as_is_cached(pages_left: int) -> None:
    load = Load()
    sequence = load.add("a", PROMPT, max_tokens=20)
    load.run_until(sequence, 24)  # six pages under the plan of 25 tokens
    load.scheduler._preempt_youngest({})
    load.pages.release(load.pages.allocate(load.num_pages - pages_left))
    step = load.step()
    # The last stage began with token 20: with fewer than 5 pages the replay begins at the beginning.
    assert step.tokens == {"a": 25 - 4 * pages_left if pages_left >= 5 else 10}
    assert step.rerotations == []
    load.run()
    assert_as_alone(sequence)


@pytest.mark.parametrize("growth", ["rerotate", "reprefill"])
def test_a_sequence_that_starts_again_at_the_end_of_its_plan_with_all_of_it_cached_goes_on(growth: Growth) -> None:
    load = Load()
    load.add("seed", list(range(12)), max_tokens=2, wish=RopeWish(factor=1.25))
    load.run()
    sequence = load.add("a", list(range(12)), max_tokens=4, wish=RopeWish(factor=1.25, growth=growth))
    load.run_until(sequence, 12)
    load.scheduler._preempt_youngest({})
    assert load.step().tokens  # an engine that computes nothing goes to sleep
    load.run()
    assert_as_alone(sequence)


def test_a_replay_that_finds_all_of_a_stage_in_the_cache_goes_on_too() -> None:
    load = Load(max_running=1)
    sequence = load.add("a", PROMPT, max_tokens=20)
    load.run_until(sequence, 22)
    load.scheduler._preempt_youngest({})
    load.pages.release(load.pages.allocate(load.num_pages))  # nothing is kept
    twin = load.add("twin", PROMPT, max_tokens=5)  # leaves three pages, all that the plan of 12 tokens covers
    load.scheduler.waiting.rotate()
    while twin in load.live:
        load.step()
    # It would have nothing to compute in that stage, so it begins in the one before, of which two pages were kept.
    assert load.step().tokens == {"a": 2}
    load.run()
    assert_as_alone(sequence)


def test_reprefill_begins_anew_as_if_it_had_been_admitted_under_the_next_rung() -> None:
    load = Load()
    sequence = load.add("a", PROMPT, max_tokens=8, wish=REPREFILL)
    steps = load.run()
    assert grown(steps) == []
    assert [step.tokens["a"] for step in steps] == [8, 1, 1, 11, 1, 13, 1, 1]
    assert sequence.num_rerotations == 0
    assert sequence.history == [Segment(0, sequence.choice.rungs[2])]
    assert load.scheduler.num_preemptions == 0
    assert_as_alone(sequence)


def test_reprefill_uses_what_others_computed_under_the_next_rung() -> None:
    load = Load()
    sequence = load.add("a", PROMPT, max_tokens=4, wish=REPREFILL)
    load.add("static", [*PROMPT, 99], wish=RopeWish(factor=1.25))
    assert [step.tokens.get("a") for step in load.run()] == [8, 1, 1, 3]
    assert_as_alone(sequence)


@pytest.mark.parametrize("refresh_tokens", [0, 1, 3, 5, 8, 13, 30])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_latest_tokens_are_computed_again_under_the_new_plan(refresh_tokens: int, prefix_caching: bool) -> None:
    load = Load(refresh_tokens=refresh_tokens, prefix_caching=prefix_caching)
    sequence = load.add("a", PROMPT, max_tokens=24)
    steps = load.run()
    computed = [step.tokens["a"] for step in steps if step.rerotations]
    # Where all would be computed again, nothing is moved before.
    assert computed == [refresh_tokens + 1 for covered in RUNGS[:-1] if covered > refresh_tokens]
    assert sequence.num_rerotations == len(computed)
    assert sequence.history == history_at(sequence.choice, 31, refresh_tokens)
    assert_as_alone(sequence, refresh_tokens)


def test_a_refresh_longer_than_a_segment_replaces_it_in_the_history() -> None:
    load = Load(refresh_tokens=5)
    sequence = load.add("a", PROMPT, max_tokens=20)
    load.run_until(sequence, 10)
    load.step()
    assert [segment.start for segment in sequence.history] == [0, 5]
    load.run_until(sequence, 12)
    load.step()
    assert [segment.start for segment in sequence.history] == [0, 5, 7]
    load.run_until(sequence, 15)
    load.step()
    assert [segment.start for segment in sequence.history] == [0, 5, 7, 10]
    whole = Load(refresh_tokens=6)
    sequence = whole.add("a", PROMPT, max_tokens=8)
    whole.run()
    assert [segment.start for segment in sequence.history] == [0, 4, 6]
    assert sequence.history[-1].plan == sequence.choice.rungs[2]


# No room


def test_the_youngest_gives_way_for_copies() -> None:
    # Two that share two pages, with one page of their own each: four of the five are in use, two copies do not fit.
    load = Load(num_pages=5)
    first = load.add("first", [*PROMPT, 1], max_tokens=4)
    load.step()
    second = load.add("second", [*PROMPT, 2], max_tokens=4)
    load.step()
    assert load.pages.num_free == 1
    assert first.num_computed == NATIVE_LENGTH
    step = load.step()
    assert load.scheduler.num_preemptions == 1
    assert [rerotation.sequence for rerotation in step.rerotations] == [first]
    assert all(move.source == move.target for move in step.rerotations[0].moves)
    assert step.tokens == {"first": 1}
    load.run()
    assert_as_alone(first)
    assert_as_alone(second)


def test_the_youngest_that_grows_gives_way_itself_and_what_others_hold_is_not_touched() -> None:
    load = Load(num_pages=5)
    first = load.add("first", PROMPT, max_tokens=4)
    load.step()
    second = load.add("second", [*PROMPT, 2, 3], max_tokens=3)
    load.step()
    assert (first.num_computed, second.num_computed) == (9, 10)
    step = load.step()  # now the second one, which is the youngest, grows: two copies do not fit
    assert load.scheduler.num_preemptions == 1
    assert step.rerotations == []
    assert step.tokens == {"first": 1, "second": 2}  # it starts again at once, with what it shares
    load.run()
    assert_as_alone(first)
    assert_as_alone(second)


def test_a_rerotation_of_one_that_gave_way_in_the_same_step_is_not_carried_out() -> None:
    load = Load(num_pages=5)
    old = load.add("old", list(range(6)), max_tokens=4)
    growing = load.add("growing", PROMPT, max_tokens=8)
    load.run_until(growing, NATIVE_LENGTH)
    assert load.pages.num_free == 0
    step = load.step()  # one grows, and the other needs a page more
    assert (step.tokens, step.rerotations) == ({"old": 1}, [])
    assert (growing.num_rerotations, growing.tables) == (1, [])
    load.run()
    for sequence in (old, growing):
        assert_as_alone(sequence)


@pytest.mark.parametrize("refresh_tokens", [0, 3])
@pytest.mark.parametrize("wish", [None, REPREFILL])
def test_a_lone_sequence_as_large_as_the_pool_grows_to_the_end_of_the_ladder(
    wish: RopeWish | None, refresh_tokens: int
) -> None:
    load = Load(num_pages=10, refresh_tokens=refresh_tokens)
    twice = [load.add(name, PROMPT, max_tokens=32, wish=wish) for name in ("a", "b")]
    load.run()
    for sequence in twice:
        assert_as_alone(sequence, refresh_tokens)


def test_the_index_holds_moved_pages_under_what_their_tokens_went_through() -> None:
    load = Load(num_pages=5)
    sequence = load.add("a", PROMPT, max_tokens=10)
    load.run()  # 17 tokens are computed: four full pages
    history, last = sequence.history, sequence.history[-1].plan
    assert [segment.start for segment in history] == [0, 10, 12, 15]
    known = [load.pages.index._keys[page][1] for page in load.pages.index]
    assert known == [Variant(tuple(history[:count]), last) for count in (1, 1, 2, 4)]
