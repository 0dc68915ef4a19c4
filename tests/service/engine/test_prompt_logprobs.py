"""Log-probabilities of prompts: each token's is told once, in order, however the prompt comes to be computed."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import FinishEvent, FinishReason, PromptEvent, SamplingParams, Sequence, TokenEvent
from service.engine import logprobs
from service.scaling.policy import PlanChoice, Policy, RopeWish
from tests.fakes import GEOMETRY, VOCABULARY, EngineUnderTest, expected_output, next_token

LIKELY = 10 - math.log(math.exp(10) + VOCABULARY - 1)
OTHERS = LIKELY - 10
TOLD = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=2)
CHOICE = Policy(GEOMETRY).choose(1, 1)
LONGER = replace(GEOMETRY, original_length=1024, native_length=1024)


def prompt_of(length: int) -> list[int]:
    """A prompt of which the fake model expects about half, in no regular way."""
    prompt = [70]
    while len(prompt) < length:
        expected = next_token(prompt)
        prompt.append(expected if sum(prompt) % 2 else 65 + len(prompt) % 20)
    return prompt


def expected_logprobs(prompt: list[int], factor: float = 1.0) -> list[float]:
    """From the second token on."""
    return [
        LIKELY if token == next_token(prompt[:place], [factor] * place) else OTHERS
        for place, token in enumerate(prompt)
        if place
    ]


def told(under_test: EngineUnderTest, name: str) -> list[TokenEvent]:
    return [token for event in under_test.events[name] if isinstance(event, PromptEvent) for token in event.tokens]


def assert_told_once_and_in_order(under_test: EngineUnderTest, name: str, prompt: list[int], factor: float = 1) -> None:
    tokens, events = told(under_test, name), under_test.events[name]
    assert [token.token_id for token in tokens] == prompt[1:]
    assert [token.logprob for token in tokens] == pytest.approx(expected_logprobs(prompt, factor), abs=1e-5)
    assert all(token.text == "" for token in tokens)
    kinds = [type(event) for event in events]
    first_output = kinds.index(TokenEvent) if TokenEvent in kinds else kinds.index(FinishEvent)
    assert PromptEvent not in kinds[first_output:]
    assert kinds.count(FinishEvent) == 1


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 33, 60])
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_in_chunks_of_any_size(length: int, budget: int) -> None:
    under_test, prompt = EngineUnderTest(max_batch_tokens=budget), prompt_of(length)
    under_test.engine.add(under_test.sequence("a", prompt, TOLD))
    under_test.run()
    assert_told_once_and_in_order(under_test, "a", prompt)
    assert under_test.token_ids("a") == expected_output(prompt, 4)
    events = sum(isinstance(event, PromptEvent) for event in under_test.events["a"])
    assert events == math.ceil(length / budget) - (length % budget == 1)  # nothing is told after a last token alone


def test_the_likeliest_tokens_are_told_beside_each() -> None:
    under_test, prompt = EngineUnderTest(), prompt_of(20)
    under_test.engine.add(under_test.sequence("a", prompt, TOLD))
    under_test.run()
    for place, token in enumerate(told(under_test, "a"), start=1):
        assert len(token.top_logprobs) == 2
        likeliest, logprob = token.top_logprobs[0]
        assert likeliest == next_token(prompt[:place])
        assert logprob == pytest.approx(LIKELY, abs=1e-5)


def test_beside_others_that_do_not_ask_and_are_not_disturbed() -> None:
    under_test, prompts = EngineUnderTest(max_batch_tokens=10), {}
    for number, (name, sampling) in enumerate({"a": None, "b": TOLD, "c": None, "d": TOLD}.items()):
        prompts[name] = prompt_of(11 + 7 * number)
        under_test.engine.add(under_test.sequence(name, prompts[name], sampling))
    under_test.run()
    for name in "bd":
        assert_told_once_and_in_order(under_test, name, prompts[name])
        assert under_test.token_ids(name) == expected_output(prompts[name], 4)
    for name in "ac":
        assert told(under_test, name) == []
        assert under_test.token_ids(name) == expected_output(prompts[name], 8)


def test_the_cache_is_not_asked_but_offered_to() -> None:
    under_test, prompt = EngineUnderTest(), prompt_of(40)
    for name, sampling in (("before", None), ("asks", TOLD), ("after", None)):
        under_test.engine.add(under_test.sequence(name, prompt, sampling))
        under_test.run()
    computed = {
        name: sum(step.get(name, 0) for step in under_test.runner.steps) for name in ("before", "asks", "after")
    }
    assert computed == {"before": 47, "asks": 43, "after": 8}  # all but a token of the prompt is found
    assert_told_once_and_in_order(under_test, "asks", prompt)


def test_a_second_time_too_and_with_the_same_numbers() -> None:
    under_test, prompt = EngineUnderTest(), prompt_of(30)
    for name in "ab":
        under_test.engine.add(under_test.sequence(name, prompt, TOLD))
        under_test.run()
        assert_told_once_and_in_order(under_test, name, prompt)


@pytest.mark.parametrize("growth", ["rerotate", "reprefill"])
@pytest.mark.parametrize("refresh_tokens", [0, 40])
def test_growth_tells_nothing_again(growth: str, refresh_tokens: int) -> None:
    under_test, prompt = EngineUnderTest(refresh_tokens=refresh_tokens), prompt_of(60)
    sampling = SamplingParams(max_tokens=60, temperature=0.0, prompt_logprobs=0)
    wish = RopeWish(growth="reprefill" if growth == "reprefill" else "rerotate")
    sequence = under_test.sequence("a", prompt, sampling, wish)
    under_test.engine.add(sequence)
    under_test.run()
    assert sequence.rung > 1
    assert len(under_test.token_ids("a")) == 60
    assert_told_once_and_in_order(under_test, "a", prompt)


def test_a_scaled_plan_is_the_one_that_the_numbers_are_of() -> None:
    under_test, prompt = EngineUnderTest(), prompt_of(100)
    under_test.engine.add(under_test.sequence("a", prompt, TOLD))
    under_test.run()
    assert_told_once_and_in_order(under_test, "a", prompt, factor=2)


@pytest.mark.parametrize("budget", [6, 16])
def test_who_gives_way_in_the_middle_goes_on_where_it_was(budget: int) -> None:
    """Both fit one after the other, not together: the younger is sent back while its prompt is computed, or later."""
    under_test = EngineUnderTest(num_pages=16, max_batch_tokens=budget, max_running=4)
    prompts = {"old": prompt_of(24), "young": prompt_of(36)}
    samplings = {"old": SamplingParams(max_tokens=30, temperature=0.0, prompt_logprobs=0), "young": TOLD}
    for name, prompt in prompts.items():
        under_test.engine.add(under_test.sequence(name, prompt, samplings[name]))
    under_test.run()
    assert under_test.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert_told_once_and_in_order(under_test, name, prompt)
        assert under_test.token_ids(name) == expected_output(prompt, samplings[name].max_tokens)


def test_a_step_that_fails_ends_it_with_what_was_told() -> None:
    def fail(number: int, _: Mapping[Sequence, int]) -> None:
        if number == 2:
            raise ValueError("broken")

    under_test, prompt = EngineUnderTest(max_batch_tokens=8, before_step=fail), prompt_of(40)
    under_test.engine.add(under_test.sequence("a", prompt, TOLD))
    under_test.run()
    assert [token.token_id for token in told(under_test, "a")] == prompt[1:17]
    [end] = under_test.ends("a")
    assert end.reason == FinishReason.ERROR


def test_steps_of_it_are_short_whatever_the_budget() -> None:
    under_test = EngineUnderTest(num_pages=400, max_batch_tokens=2000, policy=Policy(LONGER))
    for name, sampling in (("a", TOLD), ("b", None)):
        under_test.engine.add(under_test.sequence(name, prompt_of(700), sampling))
    under_test.run()
    assert under_test.runner.steps[:2] == [{"a": 512, "b": 700}, {"a": 188, "b": 1}]
    assert len(told(under_test, "a")) == 699


@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 12), st.none() | st.integers(0, 30), st.integers(0, 14)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**32),
)
def test_rows_of_a_step_go_where_they_belong(parts: list[tuple[int, int, int | None, int]], seed: int) -> None:
    """Each of some sequences, anywhere in its life: the rows that are told, and those that tokens are chosen from."""
    step, delivered = {}, {}
    for number, (length, outputs, count, before) in enumerate(parts):
        sequence = new_sequence(f"{number}", length, outputs, count, CHOICE)
        sequence.num_computed = min(before, sequence.num_tokens - 1)
        sequence.num_prompt_told = max(1, min(sequence.num_computed + 1, length))
        delivered[sequence] = [*range(sequence.num_prompt_told, length)] if count is not None else []
        step[sequence] = sequence.num_uncomputed
    positions = [(s, s.num_computed + place) for s, tokens in step.items() for place in s.logits_wanted(tokens)]
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(positions), VOCABULARY, generator=random)
    chosen_from = logprobs.tell_prompts(logits, step)
    last = [positions.index((s, s.num_tokens - 1)) for s in step]
    assert torch.equal(chosen_from, logits[last])
    expected = logits.double().log_softmax(dim=-1)
    for sequence, places in delivered.items():
        received = [token for event in EVENTS[sequence.request_id] for token in event.tokens]
        assert [token.token_id for token in received] == [sequence.prompt[place] for place in places]
        for token, place in zip(received, places, strict=True):
            row = expected[positions.index((sequence, place - 1))]
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-5)
            assert len(token.top_logprobs) == sequence.sampling.prompt_logprobs
        if sequence.sampling.prompt_logprobs is not None:
            assert sequence.num_prompt_told == len(sequence.prompt)


EVENTS: dict[str, list[PromptEvent]] = {}


def new_sequence(name: str, length: int, outputs: int, count: int | None, choice: PlanChoice) -> Sequence:
    EVENTS[name] = []
    prompt = [(7 * place + length) % VOCABULARY for place in range(length)]
    sampling = SamplingParams(max_tokens=20, prompt_logprobs=count)
    sequence = Sequence(name, prompt, choice, sampling, deliver=EVENTS[name].append)  # type: ignore[arg-type]
    sequence.output = [*range(outputs)]
    return sequence
