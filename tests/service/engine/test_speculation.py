"""Guesses from a sequence's own text change how many steps it takes, and nothing else."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import Event, FinishEvent, FinishReason, SamplingParams, Sequence, Timing
from service.engine.speculation import NGRAM, TRIES, PromptLookup
from service.scaling.policy import Policy, RopeWish
from tests.fakes import GEOMETRY, EngineUnderTest, next_token

PERIOD = 7
QUOTE = list(range(40, 40 + PERIOD)) * 3
DRAFT, ACCEPTED = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)


def quoting(tokens: Iterable[int], factors: Iterable[float] = ()) -> int:
    """Says again what was said a period ago; now and then something of its own."""
    known, scaled = list(tokens), list(factors)
    if len(known) < PERIOD or len(known) % 13 == 0:
        return next_token(known, scaled)
    return known[-PERIOD]


def run(max_draft: int, requests: dict[str, tuple[list[int], SamplingParams]], **engine: int) -> EngineUnderTest:
    options: dict[str, Any] = dict(engine)
    under_test = EngineUnderTest(answer=quoting, max_draft=max_draft, **options)
    for name, (prompt, sampling) in requests.items():
        under_test.engine.add(under_test.sequence(name, prompt, sampling, RopeWish(growth="rerotate")))
    under_test.run()
    return under_test


def untimed(under_test: EngineUnderTest, name: str) -> list[Event]:
    """What a request was sent, whenever that was."""
    now = Timing(0, 0, 0, 0, 0)
    return [replace(e, timing=now) if isinstance(e, FinishEvent) else e for e in under_test.events[name]]


def metric(under_test: EngineUnderTest, name: str) -> float:
    value = under_test.metrics.registry.get_sample_value(f"ropewalk_{name}_total")
    assert value is not None
    return value


PROMPTS = st.lists(st.sampled_from([40, 41, 42, 43]), min_size=1, max_size=40)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 70),
    temperature=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 9),
    min_tokens=st.just(0),
    stop=st.sampled_from([(), ("+,",), ("*", "()")]),
    end_token_ids=st.sampled_from([frozenset[int](), frozenset({41})]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    logprobs=st.sampled_from([None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(st.tuples(PROMPTS, SAMPLING), min_size=1, max_size=4),
    max_draft=st.integers(1, 9),
    num_pages=st.sampled_from([36, 200]),
    max_batch_tokens=st.integers(8, 24),
    max_rows=st.integers(1, 24),
)
def test_every_mix_gets_the_same_events_with_guesses_and_without(
    requests: list[tuple[list[int], SamplingParams]],
    max_draft: int,
    num_pages: int,
    max_batch_tokens: int,
    max_rows: int,
) -> None:
    named = {str(number): request for number, request in enumerate(requests)}
    options = {"num_pages": num_pages, "max_batch_tokens": max_batch_tokens}
    without = run(0, named, **options)
    under_test = run(max_draft, named, max_rows_with_drafts=max_rows, **options)
    for name in named:
        assert untimed(under_test, name) == untimed(without, name)
        assert under_test.ends(name)[0].reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert metric(under_test, "generation_tokens") == metric(without, "generation_tokens")


def test_a_text_that_quotes_itself_takes_a_fraction_of_the_steps() -> None:
    one = {"a": (QUOTE, GREEDY)}
    without, under_test = run(0, one), run(6, one)
    assert under_test.token_ids("a") == without.token_ids("a")
    assert len(under_test.runner.steps) < len(without.runner.steps) / 2
    assert metric(under_test, ACCEPTED) > 0.7 * metric(under_test, DRAFT) > 0


def test_a_text_that_never_repeats_is_computed_as_without_guesses() -> None:
    plain = {"a": ([1, 2, 3, 4, 5], GREEDY)}
    under_test = EngineUnderTest(max_draft=6)
    under_test.engine.add(under_test.sequence("a", *plain["a"]))
    under_test.run()
    assert metric(under_test, DRAFT) <= TRIES + len(under_test.token_ids("a"))


def test_guesses_take_no_more_rows_than_they_may() -> None:
    requests = dict.fromkeys("abc", (QUOTE, GREEDY))
    under_test = run(6, requests, max_rows_with_drafts=8, max_batch_tokens=64)
    decoding = [step for step in under_test.runner.steps if len(step) == 3 and max(step.values()) <= 7]
    assert decoding
    assert max(sum(step.values()) for step in decoding) == 8


def test_guesses_take_no_page_from_anybody() -> None:
    requests = {name: (QUOTE, replace(GREEDY, max_tokens=19)) for name in "ab"}
    for num_pages in range(12, 21):  # both need 20
        without, under_test = (run(most, requests, num_pages=num_pages) for most in (0, 6))
        assert [under_test.text(name) for name in "ab"] == [without.text(name) for name in "ab"]
        assert under_test.scheduler.num_preemptions <= without.scheduler.num_preemptions
        assert metric(under_test, ACCEPTED) > 0


def test_a_text_that_ends_among_right_guesses_ends_there() -> None:
    one = {"a": (QUOTE, replace(GREEDY, end_token_ids=frozenset({42})))}
    under_test = run(6, one)
    assert under_test.token_ids("a") == [40, 41, 42]
    assert metric(under_test, "generation_tokens") == 3


def test_a_request_with_penalties_is_computed_as_without_guesses() -> None:
    one = {"a": ([40] * 21, replace(GREEDY, max_tokens=20, frequency_penalty=2.0))}  # the fifth 40 is one too many
    without, under_test = run(0, one), run(6, one)
    assert under_test.token_ids("a") == without.token_ids("a")
    assert metric(under_test, DRAFT) == 0


def test_a_growing_request_never_guesses_across_the_end_of_its_plan() -> None:
    prompt = QUOTE + QUOTE[:30]
    under_test = EngineUnderTest(answer=quoting, max_draft=8)
    sequence = under_test.sequence("a", prompt, replace(GREEDY, max_tokens=60), RopeWish(growth="rerotate"))
    under_test.engine.add(sequence)
    under_test.run()  # the fake model refuses a key of another plan
    assert sequence.num_rerotations > 0
    assert [end.reason for end in under_test.ends("a")] == [FinishReason.LENGTH]
    assert metric(under_test, ACCEPTED) > 0


def sequence_of(tokens: list[int]) -> Sequence:
    made = Sequence("a", tokens[:1], Policy(GEOMETRY).choose(1, 1), GREEDY, deliver=lambda _: None)
    made.output = tokens[1:]
    return made


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30), most=st.integers(1, 5), cut=st.integers(1, 29))
def test_what_followed_the_latest_occurrence_is_proposed(tokens: list[int], most: int, cut: int) -> None:
    """Compared with a search through the whole text, whether the text came at once or in two pieces."""
    lookup, made = PromptLookup(most), sequence_of(tokens)
    made.output, rest = made.output[:cut], made.output[cut:]
    lookup.propose(made)
    made.output += rest
    last = tokens[-NGRAM:]
    places = [at for at in range(len(tokens) - NGRAM) if tokens[at : at + NGRAM] == last] if len(last) == NGRAM else []
    expected = tokens[places[-1] + NGRAM :][:most] if places else []
    assert lookup.propose(made) == expected


@pytest.mark.parametrize(("accepted", "expected"), [(0, False), (4, True)])
def test_guesses_that_are_never_right_stop_and_those_that_are_go_on(accepted: int, expected: bool) -> None:
    lookup, made = PromptLookup(4), sequence_of([1, 2, 3, 4, 1, 2, 3])
    for _ in range(8):
        lookup.learn(4, accepted)
    assert bool(lookup.propose(made)) == expected


def test_a_text_that_begins_to_quote_is_noticed_after_a_while() -> None:
    lookup, made = PromptLookup(4), sequence_of([1, 2, 3, 4, 1, 2, 3])
    for _ in range(8):
        lookup.learn(4, 0)
    for _ in range(40):
        lookup.learn(0, 0)
    assert lookup.propose(made)
