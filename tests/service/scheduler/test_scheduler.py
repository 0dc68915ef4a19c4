"""The scheduler alone: who is computed in which step, who waits, and who gives way when pages run out."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.cache.pages import PageAllocator
from service.core import SamplingParams, Sequence
from service.scaling.policy import Policy
from service.scheduler.scheduler import Scheduler
from tests.fakes import GEOMETRY, PAGE_SIZE

CHOICE = Policy(replace(GEOMETRY, native_length=1024, original_length=1024)).choose(1, 1)


@dataclass
class Load:
    """A scheduler, and the life around it: requests that arrive, and steps that are computed."""

    num_pages: int = 64
    max_running: int = 8
    max_batch_tokens: int = 16
    prefix_caching: bool = False
    decode_step_seconds: float = 0
    arrivals: int = 0
    live: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pages = PageAllocator(self.num_pages, PAGE_SIZE)
        self.scheduler = Scheduler(
            self.pages,
            max_running=self.max_running,
            max_batch_tokens=self.max_batch_tokens,
            prefix_caching=self.prefix_caching,
            decode_step_seconds=self.decode_step_seconds,
        )

    def add(self, name: str, prompt: int, max_tokens: int = 1) -> Sequence:
        """Let a request arrive, later than all before it."""
        sampling = SamplingParams(max_tokens=max_tokens)
        sequence = Sequence(name, [0] * prompt, CHOICE, sampling, deliver=lambda _: None)
        sequence.arrival_time = self.arrivals
        self.arrivals += 1
        self.scheduler.add(sequence)
        self.live.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.scheduler.remove(sequence)

    def step(self) -> dict[str, int]:
        """Schedule a step and compute it: each sequence that is up to date gets a token, its number in the output."""
        step = self.scheduler.schedule()
        for sequence in self.scheduler.complete(step):
            sequence.output.append(len(sequence.output))
            if len(sequence.output) == sequence.sampling.max_tokens:
                self.remove(sequence)
        return {sequence.request_id: tokens for sequence, tokens in step.items()}

    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]

    def waiting(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.waiting]


def test_a_step_is_a_number_of_tokens_for_each_sequence() -> None:
    load = Load()
    load.add("prompt", prompt=9, max_tokens=3)
    assert [load.step() for _ in range(4)] == [{"prompt": 9}, {"prompt": 1}, {"prompt": 1}, {}]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    load = Load(max_batch_tokens=8)
    load.add("long", prompt=20, max_tokens=2)
    assert [load.step() for _ in range(5)] == [{"long": 8}, {"long": 8}, {"long": 4}, {"long": 1}, {}]


def test_decoding_comes_first_and_prompts_get_what_is_left() -> None:
    load = Load(max_batch_tokens=8)
    load.add("a", prompt=2, max_tokens=9)
    load.add("b", prompt=2, max_tokens=9)
    load.step()
    load.add("long", prompt=20)
    step = load.step()
    assert step == {"a": 1, "b": 1, "long": 6}
    assert list(step)[-1] == "long"


def test_every_decoding_sequence_has_its_row_in_every_step() -> None:
    load = Load(max_running=4, max_batch_tokens=4)
    for name in ("a", "b", "c"):
        load.add(name, prompt=1, max_tokens=30)
    load.step()
    load.add("long", prompt=20)
    assert [load.step() for _ in range(20)] == [{"a": 1, "b": 1, "c": 1, "long": 1}] * 20


def test_a_short_prompt_overtakes_a_long_one_that_has_much_left() -> None:
    load = Load(max_batch_tokens=10)
    load.add("long", prompt=100)
    assert load.step() == {"long": 10}
    load.add("short", prompt=5)
    assert load.step() == {"short": 5, "long": 5}


def test_a_prompt_does_not_overtake_one_that_was_due_before_it() -> None:
    load = Load(max_batch_tokens=10)
    load.add("long", prompt=30)
    load.step()
    load.step()
    load.add("no shorter than what is left", prompt=15)
    assert load.step() == {"long": 10}


@settings(deadline=None)
@given(
    long=st.integers(20, 120),
    short=st.integers(2, 8),
    budget=st.integers(4, 12),
    max_running=st.integers(2, 4),
)
def test_an_endless_row_of_short_prompts_does_not_starve_a_long_one(
    long: int, short: int, budget: int, max_running: int
) -> None:
    load = Load(num_pages=100, max_running=max_running, max_batch_tokens=budget)
    sequence = load.add("long", prompt=long)
    # Prompts due before the long one fit into its own length on the clock, and those that had started by then beside
    # it; the clock misses at most every other token of a prompt (a last chunk of 1 token is a decode row to it).
    most_tokens = 2 * (2 * long + max_running * short)
    for number in range(most_tokens // (budget - max_running + 1) + 1):
        while len(load.scheduler.waiting) < max_running:
            load.add(f"short {number}", prompt=short)
        load.step()
        if sequence not in load.live:
            return
    pytest.fail(f"the long prompt has {sequence.num_uncomputed} of {long} tokens left")


def test_at_most_max_running_run_and_the_rest_start_in_the_order_of_arrival() -> None:
    load = Load(max_running=2, max_batch_tokens=4)
    for name in "abcde":
        load.add(name, prompt=2, max_tokens=2)
    started: list[str] = []
    while step := load.step():
        started += [name for name in step if name not in started]
        assert len(step) <= 2
    assert started == list("abcde")


def test_a_request_that_does_not_fit_is_not_passed_by_a_smaller_one() -> None:
    load = Load(num_pages=10, max_batch_tokens=32)
    load.add("running", prompt=20, max_tokens=2)
    load.add("too large for now", prompt=30)
    load.add("small", prompt=1)
    load.step()
    assert (load.running(), load.waiting()) == (["running"], ["too large for now", "small"])
    load.step()
    load.step()
    assert load.waiting() == []


@pytest.mark.parametrize(("prompt", "starts"), [(12, True), (13, False)])
def test_a_request_starts_when_its_pages_fit_and_one_to_spare_for_each_that_runs(prompt: int, starts: bool) -> None:
    load = Load(num_pages=7)
    load.add("a", prompt=2, max_tokens=9)
    load.add("b", prompt=2, max_tokens=9)
    load.step()
    assert load.pages.num_free == 5
    load.add("new", prompt=prompt)
    load.scheduler.schedule()
    assert ("new" in load.running()) == starts


def test_a_lone_request_as_large_as_the_pool_runs_to_its_end() -> None:
    load = Load(num_pages=5)
    sequence = load.add("whole pool", prompt=15, max_tokens=5)
    steps = 0
    while load.step():
        steps += 1
    assert (steps, len(sequence.output)) == (5, 5)
    assert load.scheduler.num_preemptions == 0


def test_a_request_that_can_never_fit_is_not_accepted() -> None:
    with pytest.raises(AssertionError):
        Load(num_pages=5).add("too large", prompt=15, max_tokens=6)


def test_when_pages_run_out_the_youngest_gives_way_and_waits_before_all_that_came_later() -> None:
    load = Load(num_pages=7, max_batch_tokens=20)
    load.add("a", prompt=7, max_tokens=9)
    load.add("b", prompt=7, max_tokens=9)
    c = load.add("c", prompt=3, max_tokens=9)
    load.step()
    load.add("later", prompt=20, max_tokens=1)
    load.step()
    assert (load.running(), load.pages.num_free) == (["a", "b", "c"], 2)
    # Now all three need a page. c, due first, takes one and has to give it back.
    assert load.step() == {"a": 1, "b": 1}
    assert (load.running(), load.waiting()) == (["a", "b"], ["c", "later"])
    assert (c.output, c.tables, c.num_computed) == ([0, 1], [], 0)
    assert load.scheduler.num_preemptions == 1


def test_what_was_preempted_is_computed_again_with_its_output_and_goes_on_from_there() -> None:
    load = Load(num_pages=6, max_batch_tokens=32)
    a = load.add("a", prompt=7, max_tokens=9)
    b = load.add("b", prompt=11, max_tokens=9)
    steps = []
    while step := load.step():
        steps.append(step)
    together, alone = [{"a": 7, "b": 11}, {"a": 1, "b": 1}], [{"a": 1}] * 7
    assert steps == [*together, *alone, {"b": 11 + len(together)}, *[{"b": 1}] * 6]
    assert load.scheduler.num_preemptions == 1
    assert a.output == b.output == list(range(9))


def test_pages_return_at_once_when_a_running_sequence_is_taken_out() -> None:
    load = Load(num_pages=10)
    a = load.add("a", prompt=16, max_tokens=9)
    load.add("b", prompt=7, max_tokens=9)
    load.step()
    load.remove(a)
    assert (load.pages.num_used, load.running()) == (2, ["b"])
    load.pages.check()


def test_a_waiting_sequence_that_is_taken_out_never_runs() -> None:
    load = Load(max_running=1, max_batch_tokens=4)
    load.add("a", prompt=1, max_tokens=2)
    b = load.add("b", prompt=1)
    load.add("c", prompt=1)
    load.step()
    load.remove(b)
    assert [load.step(), load.step(), load.step()] == [{"a": 1}, {"c": 1}, {}]


REQUESTS = st.tuples(st.integers(1, 24), st.integers(1, 16))
ACTIONS = st.lists(st.one_of(st.just("step"), REQUESTS, st.floats(0, 0.999)), max_size=40)


@settings(deadline=None, max_examples=300)
@given(
    actions=ACTIONS,
    num_pages=st.integers(10, 24),
    max_running=st.integers(1, 5),
    spare_budget=st.integers(0, 8),
)
def test_whatever_arrives_and_is_cancelled_all_else_ends_and_the_pool_is_whole(
    actions: list[str | tuple[int, int] | float], num_pages: int, max_running: int, spare_budget: int
) -> None:
    load = Load(num_pages, max_running, max_running + spare_budget)
    everyone: list[Sequence] = []
    cancelled: list[Sequence] = []
    for action in actions:
        if isinstance(action, tuple):
            everyone.append(load.add(str(len(everyone)), *action))
        elif isinstance(action, float):
            if load.live:
                cancelled.append(load.live[int(action * len(load.live))])
                load.remove(cancelled[-1])
        else:
            checked_step(load)
    # The oldest always goes on, so each computes its tokens once as the oldest, with at most all others beside it.
    most_steps = sum(sequence.num_tokens_at_most for sequence in everyone) * (len(everyone) + 1)
    for _ in range(most_steps):
        if not load.live:
            break
        checked_step(load)
    assert load.live == []
    assert load.step() == {}
    load.pages.check()
    assert load.pages.num_used == 0
    for sequence in everyone:
        assert sequence in cancelled or sequence.output == list(range(sequence.sampling.max_tokens))


def checked_step(load: Load) -> None:
    """One step, with all that is true of every step."""
    oldest = load.live[0] if load.live else None
    computed_before = {sequence: sequence.num_computed for sequence in load.live}

    step = load.step()

    assert bool(step) == (oldest is not None)
    assert sum(step.values()) <= load.max_batch_tokens
    assert all(tokens > 0 for tokens in step.values())
    assert len(load.scheduler.running) <= load.max_running
    assert load.waiting() == sorted(load.waiting(), key=int)
    if oldest is not None and oldest in load.live:
        assert oldest in load.scheduler.running
        assert oldest.num_computed >= computed_before[oldest], "the oldest lost what was computed"
    for sequence in load.scheduler.running:
        assert sequence.num_placed >= sequence.num_computed
    held = [page for sequence in load.live for table in sequence.tables for page in table.pages]
    assert len(set(held)) == len(held) == load.pages.num_used
    load.pages.check()
