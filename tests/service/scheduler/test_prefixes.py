"""Shared beginnings: who starts with what others computed, what is kept for whom, and when it is not."""

import pytest

from service.core import PageCopy, PageMove, Segment, Sequence
from service.scaling.policy import RopeWish
from service.scheduler.prefixes import Prefix, Prefixes
from tests.service.growing import POLICY, REPREFILL, Load, answer, expected_growing

PROMPT = list(range(20, 29))  # two full pages and a token
STATIC = RopeWish(factor=4.0)
ANY_PLAN = RopeWish(factor=4.0, prefix_reuse="rerotate")


def assert_as_alone(*sequences: Sequence) -> None:
    for sequence in sequences:
        assert sequence.output == expected_growing(sequence.prompt, sequence.sampling.max_tokens, sequence.choice)


def assert_as_its_history(sequence: Sequence) -> None:
    """What it answered is what follows from the plans that its tokens went through, under others too."""
    for count, token in enumerate(sequence.output):
        assert token == answer(sequence.tokens(0, len(sequence.prompt) + count), sequence.history)


# Under the same plan


def test_a_request_starts_with_what_another_computed_while_that_still_runs_or_after() -> None:
    load = Load()
    first = load.add("first", PROMPT, max_tokens=2)
    load.step()
    second = load.add("second", [*PROMPT[:8], 7, 7], max_tokens=1)
    step = load.step()
    assert step.tokens == {"first": 1, "second": 2}
    third = load.add("third", [*PROMPT[:4], 7], max_tokens=1)
    assert load.step().tokens == {"third": 1}
    assert [sequence.num_prefix_tokens for sequence in (first, second, third)] == [0, 8, 4]
    assert_as_alone(first, second, third)


def test_shared_pages_are_the_same_pages_and_what_follows_is_written_elsewhere() -> None:
    load = Load()
    first = load.add("first", PROMPT, max_tokens=3)
    load.step()
    second = load.add("second", PROMPT, max_tokens=3)
    load.step()
    assert first.tables[0].pages[:2] == second.tables[0].pages[:2]
    assert first.tables[0].pages[2] != second.tables[0].pages[2]
    assert [load.pages.holders(page) for page in first.tables[0].pages] == [2, 2, 1]
    load.run()
    assert_as_alone(first, second)


@pytest.mark.parametrize(("length", "found"), [(1, 0), (3, 2), (4, 3), (5, 4), (8, 7), (9, 8), (10, 8)])
def test_at_least_one_token_is_computed(length: int, found: int) -> None:
    load = Load()
    load.add("first", list(range(10)))
    load.run()
    second = load.add("second", list(range(length)))
    assert load.step().tokens == {"second": length - found}
    assert second.num_prefix_tokens == found
    assert_as_alone(second)


def test_output_is_found_too() -> None:
    load = Load()
    first = load.add("first", PROMPT, max_tokens=2)
    load.run()
    second = load.add("second", [*PROMPT, first.output[0]])
    third = load.add("third", [*PROMPT, first.output[0] + 1])
    load.run()
    # Ten tokens were computed at most: the third page is not full.
    assert (second.num_prefix_tokens, third.num_prefix_tokens) == (8, 8)
    longer = load.add("longer", PROMPT, max_tokens=4, wish=STATIC)
    load.run()
    again = load.add("again", [*PROMPT, *longer.output], wish=STATIC)
    load.run()
    assert again.num_prefix_tokens == 12
    assert_as_alone(second, third, again)


def test_nothing_is_found_under_another_plan() -> None:
    load = Load()
    load.add("unscaled", PROMPT)
    load.run()
    static = load.add("static", PROMPT, wish=STATIC)
    twice = load.add("twice", PROMPT, wish=RopeWish(factor=2.0))
    load.run()
    assert (static.num_prefix_tokens, twice.num_prefix_tokens) == (0, 0)
    again = load.add("again", PROMPT, wish=STATIC)
    load.run()
    assert again.num_prefix_tokens == 8
    assert_as_alone(static, twice, again)


def test_mode_and_growth_do_not_matter() -> None:
    load = Load()
    load.add("native", PROMPT)
    load.run()
    dynamic = load.add("dynamic", PROMPT, max_tokens=5)
    reprefill = load.add("reprefill", PROMPT, max_tokens=5, wish=REPREFILL)
    assert dynamic.choice.mode != "native"
    load.run()
    assert (dynamic.num_prefix_tokens, reprefill.num_prefix_tokens) == (8, 8)
    assert_as_alone(dynamic, reprefill)


def test_where_it_is_off_nothing_is_shared_or_kept() -> None:
    load = Load(prefix_caching=False)
    first = load.add("first", PROMPT, max_tokens=4)
    load.step()
    second = load.add("second", PROMPT, max_tokens=4)
    assert load.step().tokens == {"first": 1, "second": 9}
    load.run()
    assert (second.num_prefix_tokens, load.pages.num_kept, list(load.pages.index)) == (None, 0, [])
    assert first.page_digests == second.page_digests == []
    assert_as_alone(first, second)


def test_a_prefix_counts_for_the_first_start_only() -> None:
    load = Load()
    sequence = load.add("a", PROMPT, max_tokens=6)
    load.step()
    load.scheduler._preempt_youngest({})
    assert load.step().tokens == {"a": 2}  # it finds its own pages again
    assert sequence.num_prefix_tokens == 0
    load.run()
    assert_as_alone(sequence)


def test_a_prompt_is_found_as_far_as_its_chunks_have_come() -> None:
    load = Load(max_running=6, max_batch_tokens=6)
    load.add("first", list(range(10)))
    load.step()
    second = load.add("second", list(range(10)))
    load.run()
    assert second.num_prefix_tokens == 4
    assert_as_alone(second)


def assert_nothing_fits(load: Load, running: Sequence, waiting: Sequence) -> list[Prefix]:
    """A sequence that waits gets none of its candidates, and trying changes nothing, also for one that runs."""
    free, kept = load.pages.num_free, load.pages.num_kept
    prefixes = Prefixes(load.pages, load.scheduler.needs, enabled=True)
    candidates = list(prefixes.candidates(waiting))
    for prefix in candidates:
        assert prefixes.attach(waiting, prefix, spare=1) is None
        assert (load.pages.num_free, load.pages.num_kept) == (free, kept)
        assert (waiting.tables, waiting.num_computed, waiting.stage) == ([], 0, 0)
        assert [load.pages.holders(page) for page in running.tables[0].pages] == [1, 1, 1]
    return candidates


# A part of a page


@pytest.mark.parametrize("same", range(12))
def test_a_request_is_found_down_to_the_token(same: int) -> None:
    load = Load()
    load.add("first", list(range(12)), wish=STATIC)
    load.run()
    second = load.add("second", [*range(same), 99, 99, 99], wish=STATIC, max_tokens=3)
    assert load.step().tokens == {"second": 3}
    assert second.num_prefix_tokens == same
    load.run()
    assert_as_alone(second)


def test_a_part_that_costs_more_to_copy_than_to_compute_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.scheduler.prefixes.LEAST_PART", 2)  # half a page
    load = Load()
    load.add("first", list(range(12)), wish=STATIC)
    load.run()
    sequences = [load.add(f"{same}", [*range(same), 99, 99, 99], wish=STATIC) for same in (1, 2, 9, 10)]
    load.run()
    assert [sequence.num_prefix_tokens for sequence in sequences] == [0, 2, 8, 10]


def test_the_page_of_which_a_part_fits_is_copied_and_its_copy_written() -> None:
    load = Load()
    first = load.add("first", list(range(12)), max_tokens=8, wish=STATIC)
    load.step()
    second = load.add("second", [*range(10), 99, 99, 99], max_tokens=3, wish=STATIC)
    step = load.step()
    [source, target] = first.tables[0].pages[2], second.tables[0].pages[2]
    assert (step.rerotations, step.copies) == ([], [PageCopy(second, (source,), (target,), 2)])
    assert source != target
    assert [load.pages.holders(page) for page in first.tables[0].pages[:3]] == [2, 2, 1]
    assert second.num_rerotations == second.num_other_plan_prefix_tokens == 0
    load.run()
    third = load.add("third", [*range(10), 99, 99, 7], wish=STATIC)
    load.run()
    assert third.num_prefix_tokens == 12  # the copy, once full, is found like any page
    assert_as_alone(first, second, third)


def test_of_several_pages_the_one_that_fits_longest_is_copied() -> None:
    load = Load()
    for number, tail in enumerate(([1, 2, 3, 4], [1, 2, 9, 9], [1, 7, 7, 7], [8, 8, 8, 8])):
        load.add(f"{number}", [*PROMPT[:4], *tail])
    load.run()
    sequence = load.add("a", [*PROMPT[:4], 1, 2, 9, 1, 1])
    load.run()
    assert sequence.num_prefix_tokens == 7
    assert_as_alone(sequence)


def test_no_part_is_taken_of_a_page_of_another_plan_nor_of_one_that_grew_on_the_way() -> None:
    load = Load()
    load.add("unscaled", PROMPT)
    load.run()
    static = load.add("static", PROMPT[:7], wish=STATIC)
    load.run()
    assert static.num_prefix_tokens == 0
    load = Load(num_pages=5)  # nothing unscaled is kept
    grown = load.add("grown", PROMPT, max_tokens=6)
    load.run()
    assert grown.num_rerotations > 0
    unscaled = load.add("unscaled", PROMPT[:7])
    load.run()
    assert unscaled.num_prefix_tokens == 0
    assert_as_alone(static, grown, unscaled)


def test_no_part_reaches_into_the_next_plan() -> None:
    load = Load()
    load.add("unscaled", PROMPT)
    load.run()
    sequence = load.add("a", PROMPT, max_tokens=8, wish=ANY_PLAN)
    load.run_until(sequence, 12)
    load.scheduler._preempt_youngest({})
    steps = load.run()
    # Two unscaled pages are there, but a token is left to compute before it moves on at eight.
    assert [copy.tokens for copy in steps[0].copies] == [3]
    assert [step.tokens for step in steps[:2]] == [{"a": 1}, {"a": 5}]
    assert [len(step.rerotations) for step in steps[:2]] == [0, 1]
    assert_as_its_history(sequence)


def test_where_a_page_to_copy_would_take_the_last_room_it_is_done_without() -> None:
    load = Load(num_pages=4)
    load.add("first", list(range(12)), wish=STATIC)
    load.run()
    held = load.pages.allocate(1)
    assert (load.pages.num_kept, load.pages.num_evictions) == (3, 0)
    # All three pages are needed: the third to write to, so that it cannot be held to be copied.
    sequence = load.add("a", [*range(10), 99], max_tokens=2, wish=STATIC)
    step = load.step()
    assert (step.tokens, step.copies, sequence.num_prefix_tokens) == ({"a": 3}, [], 8)
    load.pages.release(held)
    load.run()
    assert_as_alone(sequence)


def test_what_was_copied_is_let_go_where_its_sequence_has_to_wait() -> None:
    load = Load(num_pages=5)
    running = load.add("running", PROMPT, max_tokens=5)
    load.step()
    waiting = load.add("waiting", [*PROMPT[:6], 1, 2, 3])
    tried = assert_nothing_fits(load, running, waiting)
    assert [prefix.part.tokens for prefix in tried] == [2, 0, 0]
    load.run()
    assert_as_alone(running, waiting)


# What is kept


def test_the_longest_unused_goes_first_and_a_tail_before_its_head() -> None:
    load = Load(num_pages=7)
    for number in range(3):
        load.add(f"{number}", [number] * 9)
        load.run()
    # Two full pages of each would be six; the third request needed three pages at a time and one is never kept.
    assert (load.pages.num_kept, load.pages.num_evictions) == (6, 0)
    load.add("new", [7] * 9)
    load.run()
    assert load.pages.num_evictions == 2
    found = []
    for number in (2, 1, 0):
        probe = load.add(f"again {number}", [number] * 9)
        load.run()
        found.append(probe.num_prefix_tokens)
    assert found == [8, 8, 0]


def test_of_one_sequence_the_head_outlives_the_tail() -> None:
    load = Load(num_pages=5)
    load.add("old", list(range(10)), wish=STATIC, max_tokens=8)  # 17 tokens are computed: four full pages
    load.run()
    assert load.pages.num_kept == 4
    load.add("new", [7] * 10)
    load.run()
    probe = load.add("again", list(range(10)), wish=STATIC)
    load.run()
    assert probe.num_prefix_tokens == 8
    assert load.pages.num_evictions == 2


def test_what_is_in_use_is_never_evicted() -> None:
    load = Load(num_pages=6)
    first = load.add("first", PROMPT, max_tokens=10)
    load.step()
    for number in range(6):
        load.add(f"{number}", [number] * 5)
    load.run()
    assert load.pages.num_evictions > 0
    assert_as_alone(first)


def test_kept_pages_are_no_obstacle_to_a_request_as_large_as_the_pool() -> None:
    load = Load(num_pages=10)
    small = load.add("small", PROMPT)
    load.run()
    large = load.add("large", PROMPT, max_tokens=31, wish=STATIC)
    load.run()
    again = load.add("again", PROMPT, max_tokens=31, wish=STATIC)
    load.run()
    assert load.scheduler.num_preemptions == 0
    assert again.num_prefix_tokens == 8
    assert_as_alone(small, large, again)


# Under another plan


def test_pages_of_another_plan_are_copied_and_re_rotated_where_a_request_asks_for_it() -> None:
    load = Load()
    load.add("unscaled", PROMPT)
    load.run()
    sources = list(load.pages.index)
    sequence = load.add("a", PROMPT, max_tokens=4, wish=ANY_PLAN)
    step = load.step()
    [rerotation] = step.rerotations
    unscaled = POLICY.choose(1, 1).plan
    assert (rerotation.sequence, rerotation.old, rerotation.new) == (sequence, unscaled, sequence.plan)
    assert rerotation.tokens == 8
    assert rerotation.moves == [
        PageMove(source, target, number)
        for number, (source, target) in enumerate(zip(sources, sequence.tables[0].pages[:2], strict=True))
    ]
    assert not set(sources) & set(sequence.tables[0].pages)
    assert step.tokens == {"a": 1}
    assert (sequence.num_prefix_tokens, sequence.num_other_plan_prefix_tokens, sequence.num_rerotations) == (8, 8, 0)
    assert sequence.history == [Segment(0, unscaled), Segment(8, sequence.choice.plan)]
    load.run()
    assert_as_its_history(sequence)


def test_what_was_taken_over_is_found_by_nobody_who_did_not_ask_and_again_by_who_did() -> None:
    load = Load()
    load.add("unscaled", PROMPT)
    load.run()
    load.add("took over", PROMPT, wish=ANY_PLAN)
    load.run()
    static = load.add("static", PROMPT, wish=STATIC)
    unscaled = load.add("unscaled again", PROMPT)
    load.run()
    assert (static.num_prefix_tokens, unscaled.num_prefix_tokens) == (0, 8)
    assert_as_alone(static, unscaled)


def test_of_equal_length_what_was_computed_under_the_own_plan_is_taken() -> None:
    load = Load()
    load.add("unscaled", [*PROMPT[:8], 1])
    load.add("static", PROMPT, wish=STATIC)
    load.run()
    sequence = load.add("a", PROMPT, wish=ANY_PLAN)
    assert load.step().rerotations == []
    assert (sequence.num_prefix_tokens, sequence.num_other_plan_prefix_tokens) == (8, 0)
    assert_as_alone(sequence)


def test_of_equal_length_what_went_through_the_own_plan_only_is_taken_before_what_was_taken_over() -> None:
    load = Load()
    load.add("unscaled", PROMPT)
    load.run()
    load.add("took over", PROMPT, wish=ANY_PLAN)
    load.run()
    load.add("static", PROMPT, wish=STATIC)
    load.run()
    sequence = load.add("a", PROMPT, wish=ANY_PLAN)
    load.run()
    assert (sequence.num_prefix_tokens, sequence.history) == (8, [Segment(0, sequence.choice.plan)])
    assert_as_alone(sequence)


def test_a_longer_prefix_of_another_plan_is_taken_before_a_shorter_one_of_the_own() -> None:
    load = Load()
    load.add("unscaled", PROMPT)
    load.add("static", PROMPT[:5], wish=STATIC)
    load.run()
    sequence = load.add("a", PROMPT, wish=ANY_PLAN)
    load.step()
    assert (sequence.num_prefix_tokens, sequence.num_other_plan_prefix_tokens) == (8, 8)
    assert_as_its_history(sequence)


def test_pages_that_grew_can_be_taken_over_with_their_history() -> None:
    load = Load()
    grown = load.add("grown", PROMPT, max_tokens=8)
    load.run()
    assert [segment.start for segment in grown.history] == [0, 10, 12, 15]
    sequence = load.add("a", [*PROMPT, *grown.output], max_tokens=4, wish=ANY_PLAN)
    load.run()
    assert (sequence.num_prefix_tokens, sequence.num_other_plan_prefix_tokens) == (16, 16)
    assert sequence.history == [*grown.history, Segment(16, sequence.choice.plan)]
    assert_as_its_history(sequence)


def test_where_the_copies_do_not_fit_it_starts_with_the_shorter_prefix_of_its_own_plan() -> None:
    load = Load(num_pages=4)
    load.add("unscaled", PROMPT)
    load.run()
    sequence = load.add("a", PROMPT, max_tokens=2, wish=ANY_PLAN)
    step = load.step()
    # Two pages to copy from and three to hold are more than four; without a prefix three are enough.
    assert (step.tokens, step.rerotations, sequence.num_prefix_tokens) == ({"a": 9}, [], 0)
    load.run()
    assert_as_alone(sequence)

    load = Load(num_pages=6)
    load.add("static", PROMPT[:5], wish=STATIC)
    load.run()
    load.add("unscaled", [*PROMPT, 1], max_tokens=3, wish=RopeWish(factor=1.25))
    load.run()
    held = load.pages.allocate(2)
    assert (load.pages.num_evictions, load.pages.num_kept) == (0, 4)
    sequence = load.add("a", [*PROMPT, 1], max_tokens=2, wish=ANY_PLAN)
    step = load.step()
    assert (step.tokens, step.rerotations, sequence.num_prefix_tokens) == ({"a": 6}, [], 4)
    load.pages.release(held)
    load.run()
    assert_as_alone(sequence)


def test_a_request_for_which_nothing_fits_changes_nothing_and_waits() -> None:
    load = Load(num_pages=5)
    running = load.add("running", PROMPT, max_tokens=5)
    load.step()
    waiting = load.add("waiting", [*PROMPT, 1, 2, 3, 4], wish=ANY_PLAN)
    assert_nothing_fits(load, running, waiting)
    load.run()
    assert_as_alone(running)
    assert_as_its_history(waiting)


def test_a_sequence_that_grew_into_the_plan_of_its_prefix_moves_nothing_when_it_goes_that_way_again() -> None:
    load = Load(refresh_tokens=4)
    load.add("scaled", PROMPT, wish=RopeWish(factor=1.25))
    load.run()
    sequence = load.add("a", PROMPT, max_tokens=4, wish=RopeWish(prefix_reuse="rerotate"))
    steps = []
    while sequence.num_rerotations == 0:
        steps.append(load.step())
    unscaled, scaled, *_ = sequence.choice.rungs
    moved = [(rerotation.old, rerotation.new) for step in steps for rerotation in step.rerotations]
    assert moved == [(scaled, unscaled), (unscaled, scaled)]
    assert sequence.history == [Segment(0, scaled), Segment(6, scaled)]
    load.scheduler._preempt_youngest({})
    load.pages.release(load.pages.allocate(load.num_pages))  # nothing is kept
    steps = load.run()
    assert [step.rerotations for step in steps] == [[] for _ in steps]
    assert sum(step.tokens.get("a", 0) for step in steps) == 12  # all but the last, which nothing follows
    assert sequence.output[-1] == answer(sequence.tokens(0, 12), sequence.history)


def test_a_sequence_that_has_answered_already_is_not_given_another_history() -> None:
    load = Load(max_running=1)
    sequence = load.add("a", PROMPT, max_tokens=8, wish=ANY_PLAN)
    load.run_until(sequence, 11)
    load.scheduler._preempt_youngest({})
    load.pages.release(load.pages.allocate(load.num_pages))  # nothing is kept
    load.add("unscaled", PROMPT)
    load.scheduler.waiting.rotate()
    load.step()
    assert load.step().tokens == {"a": 12}
    load.run()
    assert_as_alone(sequence)


def test_what_was_taken_over_is_computed_the_same_way_after_preemption() -> None:
    load = Load()
    load.add("unscaled", PROMPT)
    load.run()
    sequence = load.add("a", PROMPT, max_tokens=8, wish=ANY_PLAN)
    load.run_until(sequence, 12)
    load.scheduler._preempt_youngest({})
    load.pages.release(load.pages.allocate(load.num_pages))  # nothing is kept
    steps = load.run()
    assert (steps[0].tokens, steps[1].tokens) == ({"a": 8}, {"a": 5})
    assert [len(step.rerotations) for step in steps[:3]] == [0, 1, 0]
    assert_as_its_history(sequence)


def test_what_was_taken_over_grows_like_anything_else() -> None:
    load = Load()
    load.add("static", PROMPT, wish=STATIC)
    load.run()
    sequence = load.add("a", PROMPT, max_tokens=12, wish=RopeWish(prefix_reuse="rerotate"))
    load.run()
    assert sequence.num_other_plan_prefix_tokens == 8
    assert [segment.start for segment in sequence.history] == [0, 8, 10, 12, 15]
    assert_as_its_history(sequence)


def test_two_of_different_plans_take_over_the_same_pages_in_one_step() -> None:
    load = Load()
    load.add("unscaled", PROMPT)
    load.run()
    wishes = [RopeWish(factor=factor, prefix_reuse="rerotate") for factor in (1.5, 2.0, 4.0)]
    sequences = [load.add(str(wish.factor), PROMPT, max_tokens=3, wish=wish) for wish in wishes]
    step = load.step()
    assert len(step.rerotations) == 3
    assert step.tokens == {"1.5": 1, "2.0": 1, "4.0": 1}
    load.run()
    for sequence in sequences:
        assert_as_its_history(sequence)


def test_what_was_moved_back_to_its_first_plan_is_not_taken_for_what_never_left_it() -> None:
    load = Load(num_pages=7)
    grown = load.add("grown", PROMPT, max_tokens=6)
    load.run()
    assert grown.num_rerotations > 0
    for page in load.pages.index.find(grown.page_digests, grown.history, grown.choice.rungs[0]):
        load.pages.index.forget(page)  # as if they had been evicted
        load.pages._kept.pop(page)
        load.pages._empty.append(page)
    back = load.add("back", PROMPT, max_tokens=1, wish=RopeWish(prefix_reuse="rerotate"))
    load.run()
    assert (back.plan, back.num_other_plan_prefix_tokens) == (grown.choice.rungs[0], 8)
    again = load.add("again", PROMPT, max_tokens=1)
    load.run()
    assert again.num_prefix_tokens == 0


def test_what_another_plan_computed_is_told_also_where_nothing_has_to_be_moved() -> None:
    load = Load()
    load.add("grown", PROMPT, max_tokens=8)
    load.run()
    reuse = RopeWish(prefix_reuse="rerotate", factor=1.5)
    sequences = [load.add(f"{n}", [*PROMPT, 9, 9, 9, 9], max_tokens=1, wish=reuse) for n in range(1)]
    load.run()
    [sequence] = sequences
    assert sequence.num_prefix_tokens == sequence.num_other_plan_prefix_tokens > 0


def test_an_answer_names_the_requests_own_plan_whoever_computed_under_one_that_rotates_alike() -> None:
    load = Load()
    load.add("yarn", PROMPT, max_tokens=1, wish=RopeWish(scheme="yarn", factor=1.5, growth="stop"))
    load.run()
    wish = RopeWish(scheme="dynamic-yarn", factor=1.5, growth="stop", prefix_reuse="rerotate")
    sequence = load.add("alike", [*PROMPT, 1], max_tokens=1, wish=wish)
    load.run()
    assert sequence.num_prefix_tokens == 8
    assert sequence.last_plan.scheme == "dynamic-yarn"


def test_reprefill_takes_its_pages_before_younger_ones() -> None:
    load = Load(num_pages=8)
    oldest = load.add("oldest", PROMPT, max_tokens=16, wish=RopeWish(growth="reprefill"))
    for number in range(3):
        load.add(f"{number}", [40 + number] * 2, max_tokens=6, wish=RopeWish(growth="stop"))
    steps = load.run()
    last = max(number for number, step in enumerate(steps) if "oldest" in step.tokens)
    assert all("oldest" in step.tokens for step in steps[:last])
    assert_as_alone(oldest)
