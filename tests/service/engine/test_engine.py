"""The engine on a fake model: every request gets the text that it would get alone, and ends exactly once."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import (
    Event,
    FinishEvent,
    FinishReason,
    PageCopy,
    PromptEvent,
    Rerotation,
    SamplingParams,
    Sequence,
    TokenEvent,
)
from service.engine.detokenize import TextStream
from service.scaling.policy import RopeWish
from tests.fakes import PAGE_SIZE, ByteStream, EngineUnderTest, expected_output, next_token
from tests.service.growing import NATIVE_LENGTH, POLICY, REPREFILL, GrowingEngine, answer, expected_growing

PROMPT = [5, 9, 2]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
RULED_OUT = 0  # the token that a greedy row takes when the fake model's own choice is ruled out


def text_of(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def run_alone(sampling: SamplingParams, prompt: list[int] = PROMPT) -> tuple[EngineUnderTest, FinishEvent]:
    """Run one request to its end."""
    under_test = EngineUnderTest()
    under_test.engine.add(under_test.sequence("a", prompt, sampling))
    under_test.run()
    [end] = under_test.ends("a")
    assert under_test.events["a"][-1] is end
    return under_test, end


def metric(under_test: EngineUnderTest, name: str, **labels: str) -> float:
    value = under_test.metrics.registry.get_sample_value(f"ropewalk_{name}", labels)
    assert value is not None, f"no metric {name} {labels}"
    return value


# Any mix


@dataclass(frozen=True)
class Request:
    """One request of a mix: in which round it arrives, what it asks for, and in which round it is cancelled, if any."""

    arrives: int
    prompt: list[int]
    max_tokens: int
    factor: float | None
    cancelled: int | None


REQUESTS = st.builds(
    Request,
    arrives=st.integers(0, 12),
    prompt=st.lists(st.integers(0, 127), min_size=1, max_size=20),
    max_tokens=st.integers(1, 12),
    factor=st.sampled_from([None, None, 1.0, 2.0, 4.0]),
    cancelled=st.none() | st.integers(0, 40),
)


@settings(deadline=None, max_examples=200)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=8),
    num_pages=st.integers(8, 20),
    max_running=st.integers(1, 5),
    spare_budget=st.integers(0, 12),
)
def test_every_request_of_any_mix_gets_its_own_text_and_ends_once(
    requests: list[Request], num_pages: int, max_running: int, spare_budget: int
) -> None:
    under_test = EngineUnderTest(num_pages, max_running, max_running + spare_budget)
    sequences: dict[int, Sequence] = {}
    for now in range(41):
        for number, request in enumerate(requests):
            if request.arrives == now:
                sampling = replace(GREEDY, max_tokens=request.max_tokens)
                wish = RopeWish(factor=request.factor)
                sequences[number] = under_test.sequence(str(number), request.prompt, sampling, wish)
                under_test.engine.add(sequences[number])
            if request.cancelled == now and number in sequences:
                under_test.engine.cancel(sequences[number])
        under_test.engine.step()
        under_test.pages.check()
    under_test.run()

    for number, request in enumerate(requests):
        name = str(number)
        [end] = under_test.ends(name)
        assert under_test.events[name][-1] is end
        expected = expected_output(request.prompt, request.max_tokens, sequences[number].choice)
        received = under_test.token_ids(name)
        assert received == expected[: len(received)]
        assert under_test.text(name) == text_of(received)
        assert end.reason == (FinishReason.LENGTH if received == expected else FinishReason.CANCELLED)
        assert received == expected or request.cancelled is not None
    assert under_test.pages.num_used == 0
    assert metric(under_test, "num_preemptions_total") == under_test.scheduler.num_preemptions


SAMPLED = SamplingParams(max_tokens=12, temperature=2.0)


@settings(deadline=None, max_examples=20)
@given(seeds=st.lists(st.integers(0, 2**32), min_size=2, max_size=5, unique=True), num_pages=st.integers(8, 12))
def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_after_preemption(seeds: list[int], num_pages: int) -> None:
    crowd = EngineUnderTest(num_pages, max_running=5, max_batch_tokens=7)
    for seed in seeds:
        crowd.engine.add(crowd.sequence(str(seed), [*PROMPT, seed % 128], replace(SAMPLED, seed=seed)))
    crowd.run()
    for seed in seeds:
        alone, _ = run_alone(replace(SAMPLED, seed=seed), [*PROMPT, seed % 128])
        assert crowd.token_ids(str(seed)) == alone.token_ids("a")


def test_preempted_requests_send_no_token_twice() -> None:
    under_test = EngineUnderTest(num_pages=6, max_batch_tokens=32)
    for name in ("a", "b", "c"):
        under_test.engine.add(under_test.sequence(name, PROMPT, replace(GREEDY, max_tokens=20)))
    under_test.run()
    assert under_test.scheduler.num_preemptions > 0
    assert metric(under_test, "num_preemptions_total") == under_test.scheduler.num_preemptions
    for name in ("a", "b", "c"):
        assert under_test.token_ids(name) == expected_output(PROMPT, 20)


def test_one_forward_pass_serves_chunks_and_decode_rows_of_three_plans() -> None:
    under_test = EngineUnderTest(max_batch_tokens=16)
    prompts = {"native": [1, 2], "static": list(range(70)), "wished": [3, 4]}
    wishes = {"native": None, "static": None, "wished": RopeWish(factor=4.0)}
    sequences = {name: under_test.sequence(name, prompts[name], GREEDY, wishes[name]) for name in prompts}
    for name in ("native", "wished", "static"):
        under_test.engine.add(sequences[name])
    under_test.engine.step()
    assert metric(under_test, "iteration_plans_sum") == 3
    under_test.engine.step()
    assert under_test.runner.steps[1] == {"native": 1, "wished": 1, "static": 14}
    assert len(under_test.runner.steps) == 2
    assert metric(under_test, "iteration_plans_count") == 2
    assert metric(under_test, "iteration_plans_sum") == 6
    under_test.run()
    for name, prompt in prompts.items():
        assert under_test.token_ids(name) == expected_output(prompt, 8, sequences[name].choice)


def test_an_engine_with_nothing_to_do_says_so_and_calls_no_model() -> None:
    under_test = EngineUnderTest()
    assert not under_test.engine.step()
    assert under_test.runner.steps == []


# How a request ends


def test_max_tokens_ends_a_request_as_length() -> None:
    under_test, end = run_alone(replace(GREEDY, max_tokens=1))
    assert (under_test.token_ids("a"), end.reason, end.error) == (expected_output(PROMPT, 1), FinishReason.LENGTH, None)


def test_an_end_token_ends_a_request_as_stop_and_is_reported_without_text() -> None:
    output = expected_output(PROMPT, 8)
    assert output[3] not in output[:3]
    under_test, end = run_alone(replace(GREEDY, end_token_ids=frozenset({output[3]})))
    assert end.reason == FinishReason.STOP
    assert under_test.token_ids("a") == output[:4]
    assert under_test.text("a") == text_of(output[:3])


def test_without_end_tokens_nothing_but_max_tokens_ends_a_request() -> None:
    under_test, end = run_alone(replace(GREEDY, max_tokens=50, end_token_ids=frozenset()))
    assert (len(under_test.token_ids("a")), end.reason) == (50, FinishReason.LENGTH)


@settings(deadline=None)
@given(min_tokens=st.integers(0, 10), ends=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_no_end_token_comes_before_min_tokens(min_tokens: int, ends: list[int]) -> None:
    output = expected_output(PROMPT, 10)
    end_token_ids = frozenset(output[place] for place in ends)
    expected: list[int] = []
    while len(expected) < 10:
        token = next_token(PROMPT + expected)
        if token in end_token_ids and len(expected) < min_tokens:
            token = RULED_OUT
        expected.append(token)
        if token in end_token_ids:
            break
    under_test, end = run_alone(replace(GREEDY, max_tokens=10, min_tokens=min_tokens, end_token_ids=end_token_ids))
    assert under_test.token_ids("a") == expected
    assert end.reason == (FinishReason.STOP if expected[-1] in end_token_ids else FinishReason.LENGTH)


@settings(deadline=None)
@given(start=st.integers(0, 11), length=st.integers(1, 4), min_tokens=st.integers(0, 12))
def test_a_stop_string_across_tokens_ends_the_text_before_it_but_not_before_min_tokens(
    start: int, length: int, min_tokens: int
) -> None:
    output = text_of(expected_output(PROMPT, 12))
    stop = output[start : start + length]
    at = output.find(stop, max(0, min_tokens - 1))  # text that was sent before min_tokens is not looked at again
    under_test, end = run_alone(replace(GREEDY, max_tokens=12, stop=(stop, "never")), PROMPT)
    assert (under_test.text("a"), end.reason) == (output[: output.find(stop)], FinishReason.STOP)
    assert text_of(under_test.token_ids("a")) == output[: output.find(stop) + len(stop)]

    under_test, end = run_alone(replace(GREEDY, max_tokens=12, stop=(stop,), min_tokens=min_tokens))
    assert under_test.text("a") == (output if at < 0 else output[:at])
    assert end.reason == (FinishReason.LENGTH if at < 0 else FinishReason.STOP)


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    output = text_of(expected_output(PROMPT, 8))
    under_test, end = run_alone(replace(GREEDY, stop=(output[-3:] + "!!",)))
    last = [event for event in under_test.events["a"][-4:] if not isinstance(event, PromptEvent)]
    assert [event.text for event in last] == ["", "", "", output[-3:]]
    assert (under_test.text("a"), end.reason) == (output, FinishReason.LENGTH)


def test_a_cancelled_request_is_sent_what_was_held_back_and_its_pages_return_at_once() -> None:
    under_test = EngineUnderTest()
    output = text_of(expected_output(PROMPT, 8))
    sequence = under_test.sequence("a", PROMPT, replace(GREEDY, stop=(output[1:3] + "!!",)))
    under_test.engine.add(sequence)
    for _ in range(3):
        under_test.engine.step()
    assert under_test.text("a") == output[:1]
    under_test.engine.cancel(sequence)
    under_test.engine.cancel(sequence)
    assert under_test.pages.num_used == 0
    [end] = under_test.ends("a")
    assert (end.reason, under_test.text("a")) == (FinishReason.CANCELLED, output[:3])
    assert not under_test.engine.step()


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_end_all_ends_those_that_run_and_those_that_wait(reason: FinishReason) -> None:
    under_test = EngineUnderTest(max_running=1, max_batch_tokens=4)
    for name in ("running", "waiting"):
        under_test.engine.add(under_test.sequence(name, PROMPT))
    under_test.engine.step()
    under_test.engine.end_all(reason)
    under_test.run()
    assert [[end.reason for end in under_test.ends(name)] for name in ("running", "waiting")] == [[reason], [reason]]
    assert under_test.pages.num_used == 0


# What fails


def failing_in(step: int) -> Callable[[int, Mapping[Sequence, int]], None]:
    def before_step(number: int, _: Mapping[Sequence, int]) -> None:
        if number == step:
            raise ArithmeticError("broken")

    return before_step


def test_a_step_that_fails_ends_its_own_requests_and_the_engine_goes_on() -> None:
    under_test = EngineUnderTest(max_running=2, before_step=failing_in(step=2))
    for name in ("a", "b", "waiting"):
        under_test.engine.add(under_test.sequence(name, PROMPT))
    for _ in range(3):
        assert under_test.engine.step()
    assert under_test.pages.num_used == 0
    under_test.run()
    for name in ("a", "b"):
        [end] = under_test.ends(name)
        assert under_test.events[name][-1] is end
        assert (end.reason, end.error) == (FinishReason.ERROR, "ArithmeticError while computing a step")
        assert under_test.token_ids(name) == expected_output(PROMPT, 2)
    [end] = under_test.ends("waiting")
    assert (end.reason, under_test.token_ids("waiting")) == (FinishReason.LENGTH, expected_output(PROMPT, 8))
    assert metric(under_test, "step_failures_total") == 1
    assert metric(under_test, "request_success_total", finished_reason="error") == 2
    assert metric(under_test, "iteration_tokens_count") == len(under_test.runner.steps) - 1


@settings(deadline=None)
@given(failing=st.integers(0, 20), budget=st.integers(4, 16), num_pages=st.integers(8, 12))
def test_a_failure_in_any_step_leaves_the_pool_whole_and_one_end_for_each(
    failing: int, budget: int, num_pages: int
) -> None:
    under_test = EngineUnderTest(num_pages, 4, budget, failing_in(failing))
    for number in range(5):
        under_test.engine.add(under_test.sequence(str(number), PROMPT * (number + 1)))
    under_test.run()
    assert under_test.pages.num_used == 0
    failed = under_test.runner.steps[failing] if failing < len(under_test.runner.steps) else {}
    for number in range(5):
        [end] = under_test.ends(str(number))
        assert end.reason == (FinishReason.ERROR if str(number) in failed else FinishReason.LENGTH)


class BrokenStream:
    """A detokeniser that fails on its third token."""

    def __init__(self) -> None:
        self._tokens = 0

    def push(self, token_id: int) -> str:
        self._tokens += 1
        if self._tokens == 3:
            raise UnicodeError("broken")
        return chr(token_id)

    def flush(self) -> str:
        raise UnicodeError("broken")


def test_a_detokeniser_that_fails_ends_its_own_request_only() -> None:
    streams: Iterator[TextStream] = iter([ByteStream(), BrokenStream(), ByteStream()])
    under_test = EngineUnderTest(new_text_stream=lambda _: next(streams))
    for name in ("a", "broken", "b"):
        under_test.engine.add(under_test.sequence(name, PROMPT))
    under_test.run()
    [end] = under_test.ends("broken")
    assert under_test.events["broken"][-1] is end
    assert (end.reason, end.error) == (FinishReason.ERROR, "UnicodeError while decoding a token")
    assert under_test.token_ids("broken") == expected_output(PROMPT, 2)
    for name in ("a", "b"):
        assert [end.reason for end in under_test.ends(name)] == [FinishReason.LENGTH]
        assert under_test.token_ids(name) == expected_output(PROMPT, 8)
    assert metric(under_test, "step_failures_total") == 0
    assert metric(under_test, "request_success_total", finished_reason="error") == 1


# Times and counts


def test_the_times_of_a_request_add_up() -> None:
    _, end = run_alone(GREEDY)
    timing = end.timing
    assert timing.first_token == pytest.approx(timing.queue + timing.prefill, abs=1e-9)
    assert timing.queue + timing.prefill + timing.decode <= timing.total + 1e-9
    assert min(timing.queue, timing.prefill, timing.decode) >= 0


def test_each_stage_is_measured_from_where_the_one_before_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking = SimpleNamespace(monotonic=count(110, 10).__next__, perf_counter=lambda: 0.0)
    monkeypatch.setattr("service.engine.engine.time", ticking)
    monkeypatch.setattr("service.scheduler.scheduler.time", ticking)
    under_test = EngineUnderTest()
    sequence = under_test.sequence("a", PROMPT, replace(GREEDY, max_tokens=3))
    sequence.arrival_time = 100
    under_test.engine.add(sequence)
    under_test.run()
    # The clock is read at the start (110), at each of three tokens (120, 130, 140) and at the end (150).
    [end] = under_test.ends("a")
    timing = end.timing
    assert (timing.queue, timing.prefill, timing.decode) == (10, 10, 20)
    assert (timing.first_token, timing.total) == (20, 50)


def test_a_stage_that_was_never_reached_took_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "service.engine.engine.time", SimpleNamespace(monotonic=lambda: 130.0, perf_counter=lambda: 0.0)
    )
    under_test = EngineUnderTest()
    sequence = under_test.sequence("a", PROMPT)
    sequence.arrival_time = 100
    under_test.engine.add(sequence)
    under_test.engine.cancel(sequence)
    [end] = under_test.ends("a")
    assert (end.timing.queue, end.timing.prefill, end.timing.decode, end.timing.total) == (30, 0, 0, 30)
    for histogram in ("request_queue_time", "request_prefill_time", "time_to_first_token"):
        assert metric(under_test, f"{histogram}_seconds_count") == 0
    assert metric(under_test, "e2e_request_latency_seconds_count") == 1


def test_a_requests_tokens_are_counted_before_it_is_told_of_its_end() -> None:
    under_test = EngineUnderTest()
    counted = []

    def receive(event: Event) -> None:
        if isinstance(event, FinishEvent):
            names = ("generation_tokens_total", "inter_token_latency_seconds_count")
            counted.append([metric(under_test, name) for name in names])

    sequence = under_test.sequence("a", PROMPT)
    sequence.deliver = receive
    under_test.engine.add(sequence)
    under_test.run()
    assert counted == [[len(sequence.output), len(sequence.output) - 1]]


def test_the_metrics_count_what_was_run() -> None:
    output = expected_output(PROMPT, 8)
    under_test = EngineUnderTest()
    under_test.engine.add(under_test.sequence("length", PROMPT))
    under_test.engine.add(under_test.sequence("stop", PROMPT, replace(GREEDY, stop=(chr(output[3]),))))
    under_test.engine.add(under_test.sequence("static", list(range(70))))
    cancelled = under_test.sequence("cancelled", PROMPT, wish=RopeWish(factor=2.0))
    under_test.engine.add(cancelled)
    under_test.engine.cancel(cancelled)
    under_test.run()

    generated = 8 + 4 + 8
    assert metric(under_test, "generation_tokens_total") == generated
    assert metric(under_test, "prompt_tokens_total") == 3 + 3 + 70
    for reason, ended in {"length": 2, "stop": 1, "cancelled": 1, "error": 0}.items():
        assert metric(under_test, "request_success_total", finished_reason=reason) == ended
    for (scheme, mode, factor), admitted in {
        ("default", "native", "1"): 2,
        ("yarn", "static", "1.25"): 1,
        ("yarn", "static", "2"): 1,
    }.items():
        assert metric(under_test, "request_plan_total", scheme=scheme, mode=mode, factor=factor) == admitted
    for histogram, observed in {
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": generated - 3,
        "request_queue_time_seconds": 3,
        "request_prefill_time_seconds": 3,
        "request_decode_time_seconds": 3,
        "e2e_request_latency_seconds": 4,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 3,
        "iteration_tokens": len(under_test.runner.steps),
        "iteration_plans": len(under_test.runner.steps),
    }.items():
        assert metric(under_test, f"{histogram}_count") == observed
    assert metric(under_test, "request_generation_tokens_sum") == generated
    assert metric(under_test, "iteration_tokens_sum") == sum(sum(step.values()) for step in under_test.runner.steps)
    assert metric(under_test, "num_preemptions_total") == 0


def test_the_gauges_follow_the_load() -> None:
    under_test = EngineUnderTest(num_pages=10, max_running=1, max_batch_tokens=4)
    first = under_test.sequence("a", PROMPT, replace(GREEDY, max_tokens=3))
    under_test.engine.add(first)
    under_test.engine.add(under_test.sequence("b", PROMPT))

    def gauges() -> tuple[float, float, float]:
        names = ("num_requests_running", "kv_cache_usage_ratio", "kv_cache_used_bytes")
        running, usage, used = (metric(under_test, name) for name in names)
        return running, usage, used

    assert metric(under_test, "kv_cache_tokens") == 10 * PAGE_SIZE
    assert metric(under_test, "kv_cache_pages") == 10
    assert metric(under_test, "kv_cache_bytes") == 10
    assert gauges() == (0, 0, 0)
    under_test.engine.step()
    assert gauges() == (1, 0.1, 1)
    under_test.engine.cancel(first)
    assert gauges() == (0, 0, 0)
    under_test.run()
    assert gauges() == (0, 0, 0)


def test_every_token_is_reported_as_soon_as_it_is_chosen() -> None:
    under_test = EngineUnderTest()
    under_test.engine.add(under_test.sequence("a", PROMPT))
    for tokens in range(1, 8):
        under_test.engine.step()
        assert under_test.events["a"][-1] == TokenEvent(
            expected_output(PROMPT, 8)[tokens - 1], chr(expected_output(PROMPT, 8)[tokens - 1])
        )
        assert len(under_test.events["a"]) == tokens


# Growth and shared prefixes


TEMPLATES = ([*range(40, 60)], [*range(40, 50), *range(70, 80)], [*range(70, 74), *range(44, 60)])
WISHES = [
    None,
    None,
    REPREFILL,
    RopeWish(growth="stop"),
    RopeWish(factor=2.0, growth="rerotate"),
    RopeWish(prefix_reuse="rerotate"),
    RopeWish(factor=2.0, prefix_reuse="rerotate"),
]


@dataclass(frozen=True)
class GrowingRequest:
    """One request of a mix: in which round it arrives, how much of which template it begins with, what comes after
    that, how much it asks for and in which round it is cancelled, if any."""

    arrives: int
    template: int
    shared: int
    own: list[int]
    max_tokens: int
    wish: RopeWish | None
    cancelled: int | None

    @property
    def prompt(self) -> list[int]:
        return [*TEMPLATES[self.template][: self.shared], *self.own]


GROWING_REQUESTS = st.builds(
    GrowingRequest,
    arrives=st.integers(0, 20),
    template=st.integers(0, len(TEMPLATES) - 1),
    shared=st.integers(0, 16),
    own=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    max_tokens=st.integers(1, 17),
    wish=st.sampled_from(WISHES),
    cancelled=st.none() | st.none() | st.integers(0, 40),
)


def admit(under_test: EngineUnderTest, name: str, request: GrowingRequest) -> Sequence:
    choice = POLICY.choose(len(request.prompt), request.max_tokens, request.wish)
    sampling = replace(GREEDY, max_tokens=choice.max_tokens)
    sequence = under_test.sequence(name, request.prompt, sampling, request.wish)
    under_test.engine.add(sequence)
    return sequence


def serve(under_test: EngineUnderTest, requests: list[GrowingRequest]) -> list[Sequence]:
    """Let requests come and go until all have ended."""
    sequences: dict[int, Sequence] = {}
    for now in range(41):
        for number, request in enumerate(requests):
            if request.arrives == now:
                sequences[number] = admit(under_test, str(number), request)
            if request.cancelled == now and number in sequences:
                under_test.engine.cancel(sequences[number])
        under_test.engine.step()
        under_test.pages.check()
    under_test.run()
    assert under_test.pages.num_used == 0
    return [sequences[number] for number in range(len(requests))]


@settings(deadline=None, max_examples=300)
@given(
    requests=st.lists(GROWING_REQUESTS, min_size=1, max_size=8),
    num_pages=st.integers(10, 20),
    max_running=st.integers(1, 5),
    spare_budget=st.integers(0, 12),
    prefix_caching=st.booleans(),
    refresh_tokens=st.sampled_from([0, 0, 0, 1, 3, 8]),
)
def test_every_request_of_a_mix_that_grows_and_shares_gets_what_it_gets_alone(
    requests: list[GrowingRequest],
    num_pages: int,
    max_running: int,
    spare_budget: int,
    prefix_caching: bool,
    refresh_tokens: int,
) -> None:
    under_test = GrowingEngine(
        num_pages,
        max_running,
        max_running + spare_budget,
        prefix_caching=prefix_caching,
        refresh_tokens=refresh_tokens,
    )
    sequences = serve(under_test, requests)
    for number, (request, sequence) in enumerate(zip(requests, sequences, strict=True)):
        [end] = under_test.ends(str(number))
        assert under_test.events[str(number)][-1] is end
        received = under_test.token_ids(str(number))
        finished = len(received) == sequence.sampling.max_tokens
        assert end.reason == (FinishReason.LENGTH if finished else FinishReason.CANCELLED)
        assert finished or request.cancelled is not None
        assert sequence.num_rerotations <= len(sequence.choice.rungs) - 1
        if sequence.choice.prefix_reuse == "same-plan" or not prefix_caching:
            expected = expected_growing(request.prompt, len(received), sequence.choice, refresh_tokens)
            assert received == expected
        elif refresh_tokens == 0:
            for count, token in enumerate(received):
                assert token == answer(sequence.tokens(0, len(request.prompt) + count), sequence.history)
    if not prefix_caching:
        assert under_test.pages.num_kept == under_test.pages.num_evictions == 0
    assert metric(under_test, "rerotations_total") == len(under_test.runner.rerotations)
    assert metric(under_test, "kv_cache_kept_bytes") == under_test.pages.num_kept


def test_the_mixes_share_grow_run_out_of_pages_and_evict() -> None:
    """What the test above is about does happen in such mixes."""
    requests = [
        GrowingRequest(number, number % 2, 9, [1], 17, wish, None) for number, wish in enumerate([*WISHES, *WISHES])
    ]
    under_test = GrowingEngine(num_pages=12, max_running=5, max_batch_tokens=16)
    sequences = serve(under_test, requests)
    assert sum((sequence.num_prefix_tokens or 0) > 0 for sequence in sequences) >= 2
    assert any(sequence.num_other_plan_prefix_tokens > 0 for sequence in sequences)
    assert under_test.scheduler.num_preemptions > 0
    assert under_test.pages.num_evictions > 0
    moves = [move for rerotation in under_test.runner.rerotations for move in rerotation.moves]
    assert {move.source == move.target for move in moves} == {True, False}


def test_a_growing_request_forwards_each_token_once_and_moves_all_its_keys_at_each_rung() -> None:
    under_test = GrowingEngine()
    sequence = under_test.sequence("a", PROMPT, replace(GREEDY, max_tokens=37))
    under_test.engine.add(sequence)
    under_test.run()
    assert under_test.token_ids("a") == expected_growing(PROMPT, 37, sequence.choice)
    assert metric(under_test, "iteration_tokens_sum") == 3 + 37 - 1
    assert metric(under_test, "iteration_tokens_count") == 37
    assert metric(under_test, "rerotations_total") == sequence.num_rerotations == 6
    assert metric(under_test, "rerotated_tokens_total") == 10 + 12 + 15 + 20 + 25 + 30
    assert metric(under_test, "rerotation_seconds_count") == 6
    assert metric(under_test, "iteration_plans_sum") == 37


def test_reprefill_forwards_all_tokens_again_and_moves_none() -> None:
    under_test = GrowingEngine()
    sequence = under_test.sequence("a", PROMPT, replace(GREEDY, max_tokens=12), REPREFILL)
    under_test.engine.add(sequence)
    under_test.run()
    assert under_test.token_ids("a") == expected_growing(PROMPT, 12, sequence.choice)
    assert metric(under_test, "iteration_tokens_sum") == 3 + 12 - 1 + 10 + 12
    assert metric(under_test, "rerotations_total") == sequence.num_rerotations == 0


def test_others_get_their_tokens_in_the_steps_before_and_after_a_growth() -> None:
    under_test = GrowingEngine(max_batch_tokens=32)
    for name, prompt, wish in (
        ("native", PROMPT, None),
        ("static", PROMPT, RopeWish(factor=4.0)),
        ("growing", [*range(9)], None),
    ):
        under_test.engine.add(under_test.sequence(name, prompt, replace(GREEDY, max_tokens=7), wish))
    for tokens in range(1, 8):
        before = len(under_test.runner.rerotations)
        under_test.engine.step()
        assert [len(under_test.token_ids(name)) for name in ("native", "static", "growing")] == [tokens] * 3
        assert len(under_test.runner.rerotations) - before == (1 if tokens in (3, 5) else 0)
    assert not under_test.engine.step()


def test_the_plans_of_a_step_are_counted_as_they_were_in_it() -> None:
    under_test = GrowingEngine()
    under_test.engine.add(under_test.sequence("native", PROMPT, replace(GREEDY, max_tokens=7)))
    under_test.engine.add(under_test.sequence("grows", [*range(9)], replace(GREEDY, max_tokens=4)))
    plans: list[float] = []
    while under_test.engine.step():
        plans.append(metric(under_test, "iteration_plans_sum") - sum(plans))
    assert plans == [1, 1, 2, 2, 1, 1, 1]  # the last step of the one that grew is of two plans too


def test_a_request_whose_keys_cannot_be_moved_ends_with_an_error_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_test = GrowingEngine()
    original = under_test.runner.rerotate

    def failing(rerotation: Rerotation) -> None:
        if rerotation.sequence.request_id == "broken":
            raise MemoryError("broken")
        original(rerotation)

    monkeypatch.setattr(under_test.runner, "rerotate", failing)
    prompt = [*range(40, 49)]
    sequences = {name: under_test.sequence(name, prompt, replace(GREEDY, max_tokens=9)) for name in ("broken", "other")}
    for sequence in sequences.values():
        under_test.engine.add(sequence)
    native = under_test.sequence("native", PROMPT, replace(GREEDY, max_tokens=6))
    under_test.engine.add(native)
    under_test.run()
    [end] = under_test.ends("broken")
    assert under_test.events["broken"][-1] is end
    assert (end.reason, end.error) == (FinishReason.ERROR, "MemoryError while re-rotating keys")
    computed = NATIVE_LENGTH - len(prompt) + 1
    assert under_test.token_ids("broken") == expected_growing(prompt, computed, sequences["broken"].choice)
    for name, sequence in (("other", sequences["other"]), ("native", native)):
        assert [end.reason for end in under_test.ends(name)] == [FinishReason.LENGTH]
        expected = expected_growing(sequence.prompt, sequence.sampling.max_tokens, sequence.choice)
        assert under_test.token_ids(name) == expected
    assert under_test.pages.num_used == 0
    assert metric(under_test, "step_failures_total") == 0
    assert metric(under_test, "request_success_total", finished_reason="error") == 1


@settings(deadline=None, max_examples=100)
@given(
    requests=st.lists(GROWING_REQUESTS, min_size=2, max_size=6),
    num_pages=st.integers(10, 16),
    failing=st.integers(0, 5),
)
def test_a_failure_of_any_move_ends_its_own_request_only(
    requests: list[GrowingRequest], num_pages: int, failing: int
) -> None:
    under_test = GrowingEngine(num_pages, 4, 12)
    original, failed = under_test.runner.rerotate, []
    moves = count()

    def rerotate(rerotation: Rerotation) -> None:
        if next(moves) == failing:
            failed.append(rerotation.sequence.request_id)
            raise MemoryError("broken")
        original(rerotation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test.runner, "rerotate", rerotate)
        patch.setattr("service.engine.engine.logger.disabled", True)
        sequences = serve(under_test, requests)
    for number, (request, sequence) in enumerate(zip(requests, sequences, strict=True)):
        [end] = under_test.ends(str(number))
        assert (end.reason == FinishReason.ERROR) == (str(number) in failed)
        received = under_test.token_ids(str(number))
        if sequence.choice.prefix_reuse == "same-plan":
            assert received == expected_growing(request.prompt, len(received), sequence.choice)


def test_the_metrics_tell_where_prefixes_came_from() -> None:
    under_test = GrowingEngine()
    prompt = [*range(40, 49)]
    for name, wish in (
        ("first", None),
        ("same", None),
        ("taken over", RopeWish(factor=4.0, prefix_reuse="rerotate")),
        ("own", RopeWish(factor=2.0)),
    ):
        under_test.engine.add(under_test.sequence(name, prompt, replace(GREEDY, max_tokens=1), wish))
        under_test.run()
    assert metric(under_test, "prefix_cache_queries_total") == 4 * 9
    assert metric(under_test, "prefix_cache_hits_total", kind="same-plan") == 8
    assert metric(under_test, "prefix_cache_hits_total", kind="other-plan") == 8
    assert metric(under_test, "rerotations_total") == 1
    assert metric(under_test, "rerotated_tokens_total") == 8


def test_a_part_of_a_page_is_a_hit_of_so_many_tokens_and_no_re_rotation() -> None:
    under_test, prompt = EngineUnderTest(), [*range(40, 56)]
    for name in ("first", "again"):
        under_test.engine.add(under_test.sequence(name, prompt))
        under_test.run()
    assert len(under_test.runner.copies) == 1
    assert metric(under_test, "prefix_cache_hits_total", kind="same-plan") == 15
    assert metric(under_test, "rerotations_total") == metric(under_test, "rerotated_tokens_total") == 0
    assert metric(under_test, "rerotation_seconds_count") == 0
    assert metric(under_test, "step_seconds_count", phase="copy") == 1
    assert metric(under_test, "step_seconds_count", phase="rerotate") == 0
    assert under_test.token_ids("again") == under_test.token_ids("first") == expected_output(prompt, 8)


def test_a_request_whose_page_cannot_be_copied_ends_with_an_error_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_test, prompt = EngineUnderTest(), [*range(40, 56)]
    under_test.engine.add(under_test.sequence("first", prompt))
    under_test.run()

    def failing(copies: list[PageCopy]) -> None:
        raise MemoryError(copies[0].sequence.request_id)

    monkeypatch.setattr(under_test.runner, "copy", failing)
    under_test.engine.add(under_test.sequence("broken", prompt))
    under_test.engine.add(under_test.sequence("other", prompt[1:]))
    under_test.run()
    [end] = under_test.ends("broken")
    assert (end.reason, end.error) == (FinishReason.ERROR, "MemoryError while copying pages")
    assert under_test.token_ids("other") == expected_output(prompt[1:], 8)
    assert under_test.pages.num_used == 0


def test_the_pace_hears_of_each_step_how_much_of_prompts_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    under_test, heard = EngineUnderTest(), []
    monkeypatch.setattr(
        under_test.scheduler.pace, "observe", lambda tokens, seconds: heard.append((tokens, seconds > 0))
    )
    under_test.engine.add(under_test.sequence("a", list(range(20)), SamplingParams(max_tokens=3, temperature=0.0)))
    under_test.run()
    assert heard == [(16, True), (4, True), (0, True), (0, True)]
