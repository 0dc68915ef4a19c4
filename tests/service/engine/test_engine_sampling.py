"""Bias, penalties, log-probabilities and grammars through the whole engine, on a fake model."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import FinishReason, SamplingParams, Sequence, TokenEvent
from service.engine import grammar, logprobs, penalties
from service.engine.grammar import Grammar, GrammarFactory, GrammarSpec, Matcher
from tests.fakes import VOCABULARY, EngineUnderTest, expected_output
from tests.serving import END_TOKEN, byte_tokenizer

PROMPT = [5, 9, 2]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=100, temperature=1.0, end_token_ids=frozenset({END_TOKEN}))


@pytest.fixture(scope="module")
def factory() -> GrammarFactory:
    return GrammarFactory(byte_tokenizer().backend_tokenizer, frozenset({END_TOKEN}))


def run(requests: Mapping[str, SamplingParams], under_test: EngineUnderTest | None = None) -> EngineUnderTest:
    """Run some requests side by side to their ends."""
    under_test = under_test or EngineUnderTest()
    for name, sampling in requests.items():
        under_test.engine.add(under_test.sequence(name, PROMPT, sampling))
    under_test.run()
    assert under_test.pages.num_used == 0
    assert all(len(under_test.ends(name)) == 1 for name in requests)
    return under_test


def reason(under_test: EngineUnderTest, name: str) -> FinishReason:
    return under_test.ends(name)[0].reason


def token_events(under_test: EngineUnderTest, name: str) -> list[TokenEvent]:
    return [event for event in under_test.events[name] if isinstance(event, TokenEvent)]


def with_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> EngineUnderTest:
    """An engine whose model's logits are changed before it sees them."""
    under_test = EngineUnderTest()
    forward = under_test.runner.forward

    def changed(step: Mapping[Sequence, int]) -> torch.Tensor:
        with torch.inference_mode():
            return change(forward(step))

    under_test.runner.forward = changed  # type: ignore[method-assign]
    return under_test


# Rows that ask for nothing


def test_rows_that_ask_for_nothing_do_no_work_over_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("called")

    for name in ("log_softmax", "masked_fill_", "topk", "index_put_", "__setitem__", "__getitem__"):
        monkeypatch.setattr(torch.Tensor, name, never)
    logits = torch.zeros(2, VOCABULARY)
    sequences = [EngineUnderTest().sequence(name, PROMPT) for name in "ab"]
    assert logprobs.distributions(logits, sequences) is None
    assert [penalties.adjustments_for(each) for each in sequences] == [None, None]
    penalties.apply(logits, {})
    grammar.rule_out(logits, {})


@pytest.mark.parametrize("beside", [{"logit_bias": {70: 100.0}}, {"logprobs": 5}, {"repetition_penalty": 2.0}])
def test_a_request_is_not_touched_by_what_another_asks_for(beside: dict[str, Any]) -> None:
    under_test = run({"plain": GREEDY, "asking": replace(GREEDY, **beside), "plain too": GREEDY})
    for name in ("plain", "plain too"):
        assert token_events(under_test, name) == [TokenEvent(token, chr(token)) for token in expected_output(PROMPT, 8)]


# Bias and penalties


def test_a_bias_forces_a_token_and_bans_another() -> None:
    first = expected_output(PROMPT, 1)[0]
    banned = run({"a": replace(GREEDY, logit_bias={first: -100.0})}).token_ids("a")
    assert banned[0] != first
    assert run({"a": replace(GREEDY, logit_bias={70: 100.0})}).token_ids("a") == [70] * 8


def test_a_frequency_penalty_grows_with_each_use_and_a_presence_penalty_does_not() -> None:
    """Two tokens four apart: the likelier comes until its penalty outweighs that."""

    def two_tokens(logits: torch.Tensor) -> torch.Tensor:
        logits = torch.full_like(logits, -100.0)
        logits[:, 70], logits[:, 80] = 5.0, 1.0
        return logits

    requests = {
        "frequency": replace(GREEDY, frequency_penalty=1.5),
        "presence": replace(GREEDY, presence_penalty=1.5),
        "strong presence": replace(GREEDY, presence_penalty=4.5),
        "repetition": replace(GREEDY, repetition_penalty=6.0),
    }
    under_test = run(requests, with_logits(two_tokens))
    assert under_test.token_ids("frequency") == [70, 70, 70, 80, 70, 80, 70, 80]
    assert under_test.token_ids("presence") == [70] * 8
    assert under_test.token_ids("strong presence") == [70, 80] + [70] * 6
    assert under_test.token_ids("repetition") == [70, 80] + [70] * 6


def test_a_repetition_penalty_counts_the_prompt_and_the_others_do_not() -> None:
    def prompt_token_is_likeliest(logits: torch.Tensor) -> torch.Tensor:
        logits = torch.full_like(logits, -100.0)
        logits[:, PROMPT[0]], logits[:, 80] = 5.0, 4.0
        return logits

    requests = {
        "repetition": replace(GREEDY, max_tokens=1, repetition_penalty=2.0),
        "frequency": replace(GREEDY, max_tokens=1, frequency_penalty=2.0, presence_penalty=2.0),
    }
    under_test = run(requests, with_logits(prompt_token_is_likeliest))
    assert under_test.token_ids("repetition") == [80]
    assert under_test.token_ids("frequency") == [PROMPT[0]]


# Preemption


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_penalties_and_grammars_go_on_where_they_were_after_preemption(seed: int, factory: GrammarFactory) -> None:
    pattern = factory.begin(GrammarSpec.regex("([a-z]{3}-)*[0-9]{2}-"), param="guided").result()
    sampling = replace(SAMPLED, max_tokens=20, temperature=2.0)
    asked = {
        "penalised": replace(sampling, frequency_penalty=2.0, repetition_penalty=1.5, seed=seed),
        "constrained": replace(sampling, grammar=pattern, seed=seed),
        "both": replace(sampling, grammar=pattern, frequency_penalty=1.0, logprobs=2, seed=seed),
    }
    crowd = run(asked, EngineUnderTest(num_pages=8, max_running=5, max_batch_tokens=32))
    for name, params in asked.items():
        assert crowd.events[name][:-1] == run({name: params}).events[name][:-1]


def test_the_mix_above_does_run_out_of_pages(factory: GrammarFactory) -> None:
    never_ends = factory.begin(GrammarSpec.regex("[a-z]{99}"), param="guided").result()
    asked = {name: replace(SAMPLED, max_tokens=20, grammar=never_ends) for name in "abc"}
    crowd = run(asked, EngineUnderTest(num_pages=8, max_running=5, max_batch_tokens=32))
    assert crowd.scheduler.num_preemptions > 0
    assert all(crowd.text(name).isalpha() and len(crowd.text(name)) == 20 for name in "abc")


# Log-probabilities


def test_each_token_comes_with_its_own_log_probability_and_the_likeliest_ones() -> None:
    biased = {70: 100.0}
    requests = {
        "none": GREEDY,
        "own": replace(GREEDY, logprobs=0),
        "three": replace(GREEDY, logprobs=3, temperature=0.7, top_k=1),
        "biased": replace(GREEDY, logprobs=1, logit_bias=biased),
    }
    under_test = run(requests)
    total = math.log(math.exp(10) + VOCABULARY - 1)
    for event in token_events(under_test, "none"):
        assert (event.logprob, event.top_logprobs) == (None, ())
    for event in token_events(under_test, "own"):
        assert event.logprob == pytest.approx(10 - total, abs=1e-5)
        assert event.top_logprobs == ()
    for event in token_events(under_test, "three"):
        assert [value for _, value in event.top_logprobs] == pytest.approx([10 - total, -total, -total], abs=1e-5)
        assert event.top_logprobs[0] == (event.token_id, event.logprob)
    for event in token_events(under_test, "biased"):
        assert event.token_id == 70
        assert event.logprob == pytest.approx(-total, abs=1e-5)  # the model's own, before the bias
        assert event.top_logprobs[0][1] == pytest.approx(10 - total, abs=1e-5)


def test_an_end_token_comes_with_its_log_probability() -> None:
    ends = frozenset({expected_output(PROMPT, 1)[0]})
    [event] = token_events(run({"a": replace(GREEDY, logprobs=1, end_token_ids=ends)}), "a")
    assert event.text == ""
    assert event.logprob is not None
    assert event.top_logprobs


# Grammars


def test_requests_with_and_without_grammars_share_steps(factory: GrammarFactory) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    json_text = factory.begin(GrammarSpec.json_schema(schema), param="response_format").result()
    choice = factory.begin(GrammarSpec.choice(["left", "right"]), param="guided").result()
    requests = {
        "json": replace(SAMPLED, grammar=json_text),
        "choice": replace(SAMPLED, grammar=choice),
        "plain": GREEDY,
    }
    noise = torch.Generator().manual_seed(3)
    under_test = run(requests, with_logits(lambda logits: logits + torch.rand(logits.shape, generator=noise)))
    assert reason(under_test, "json") == reason(under_test, "choice") == FinishReason.STOP
    jsonschema.validate(json.loads(under_test.text("json")), schema)
    assert under_test.text("choice") in ("left", "right")
    assert under_test.token_ids("plain") == expected_output(PROMPT, 8)


@pytest.mark.parametrize("sampling", [{}, {"min_tokens": 50}, {"end_token_ids": frozenset()}])
def test_a_complete_grammar_ends_a_request_as_stop_without_an_end_token(
    factory: GrammarFactory, sampling: dict[str, Any]
) -> None:
    compiled = factory.begin(GrammarSpec.regex("ab{3}"), param="guided").result()
    under_test = run({"a": replace(SAMPLED, grammar=compiled, **sampling)})
    assert (under_test.text("a"), reason(under_test, "a")) == ("abbb", FinishReason.STOP)
    assert len(under_test.token_ids("a")) == 4


def test_a_grammar_of_nothing_ends_with_an_end_token_whatever_min_tokens_says(factory: GrammarFactory) -> None:
    compiled = factory.begin(GrammarSpec.choice([""]), param="guided").result()
    under_test = run({"a": replace(SAMPLED, grammar=compiled, min_tokens=5)})
    assert (under_test.token_ids("a"), under_test.text("a")) == ([END_TOKEN], "")
    assert reason(under_test, "a") == FinishReason.STOP


@pytest.mark.parametrize("min_tokens", [0, 4])
def test_an_end_token_ends_a_text_that_may_end_but_not_before_min_tokens(
    factory: GrammarFactory, min_tokens: int
) -> None:
    def end_is_likeliest(logits: torch.Tensor) -> torch.Tensor:
        logits[:, END_TOKEN] = 50.0
        return logits

    compiled = factory.begin(GrammarSpec.regex("ab*"), param="guided").result()
    sampling = replace(SAMPLED, temperature=0.0, grammar=compiled, min_tokens=min_tokens)
    under_test = run({"a": sampling}, with_logits(end_is_likeliest))
    assert under_test.text("a") == ("abbb" if min_tokens else "a")
    assert under_test.token_ids("a")[-1] == END_TOKEN
    assert reason(under_test, "a") == FinishReason.STOP


def test_length_and_stop_strings_cut_a_constrained_text_as_any_other(factory: GrammarFactory) -> None:
    compiled = factory.begin(GrammarSpec.regex("a{9}b{9}"), param="guided").result()
    requests = {
        "length": replace(SAMPLED, max_tokens=5, grammar=compiled),
        "stop": replace(SAMPLED, stop=("ab",), grammar=compiled),
        "held back": replace(SAMPLED, stop=("bc",), grammar=compiled),
    }
    under_test = run(requests)
    assert (under_test.text("length"), reason(under_test, "length")) == ("aaaaa", FinishReason.LENGTH)
    assert (under_test.text("stop"), reason(under_test, "stop")) == ("aaaaaaaa", FinishReason.STOP)
    assert (under_test.text("held back"), reason(under_test, "held back")) == ("a" * 9 + "b" * 9, FinishReason.STOP)


def test_a_bias_cannot_break_a_grammar(factory: GrammarFactory) -> None:
    compiled = factory.begin(GrammarSpec.regex("[ab]{5}"), param="guided").result()
    sampling = replace(SAMPLED, temperature=0.0, grammar=compiled, logit_bias={ord("b"): 50.0, ord("z"): 100.0})
    assert run({"a": sampling}).text("a") == "bbbbb"


class Blind(Grammar):
    """A grammar whose matchers let every token pass and then find that it does not fit."""

    def __init__(self, compiled: Grammar) -> None:
        self._compiled = compiled

    def new_matcher(self) -> Matcher:
        matcher = self._compiled.new_matcher()
        everything = bytes([255]) * len(matcher.allowed())
        matcher.allowed = lambda: everything  # type: ignore[method-assign]
        return matcher


def test_a_grammar_that_fails_on_a_token_ends_its_own_request_only(
    factory: GrammarFactory, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = factory.begin(GrammarSpec.regex("a{20}b{20}"), param="guided").result()
    sampling = replace(SAMPLED, temperature=0.0, logit_bias={ord("a"): 100.0}, grammar=compiled)
    under_test = run({"failing": replace(sampling, grammar=Blind(compiled)), "fine": sampling, "plain": GREEDY})
    [end] = under_test.ends("failing")
    assert (end.reason, end.error) == (FinishReason.ERROR, "GrammarError while decoding a token")
    assert under_test.text("failing") == "a" * 20
    assert "aaaa" not in caplog.text
    assert (under_test.text("fine"), reason(under_test, "fine")) == ("a" * 20 + "b" * 20, FinishReason.STOP)
    assert under_test.token_ids("plain") == expected_output(PROMPT, 8)
    assert under_test.metrics.registry.get_sample_value("ropewalk_step_failures_total") == 0
