"""Bias and penalties: as transformers' processors and the plain formulas have them, in a batch as alone."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from service.core import SamplingParams, Sequence
from service.engine import penalties
from service.scaling.policy import Policy
from tests.fakes import GEOMETRY

VOCABULARY = 40
CHOICE = Policy(GEOMETRY).choose(1, 1)
TOKENS = st.integers(0, VOCABULARY - 1)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    repetition_penalty=st.just(1.0) | st.floats(0.1, 3),
)
ROW = st.tuples(PARAMS, st.lists(TOKENS, min_size=1, max_size=30), st.lists(TOKENS, max_size=90))


def adjusted(logits: torch.Tensor, rows: list[tuple[SamplingParams, list[int], list[int]]]) -> torch.Tensor:
    """Logits after each row's own prompt and output."""
    result, asking = logits.clone(), {}
    for number, (params, prompt, output) in enumerate(rows):
        adjustments = penalties.adjustments_for(Sequence("request", prompt, CHOICE, params, deliver=lambda _: None))
        if adjustments is not None:
            asking[number] = adjustments
            for token in output:
                adjustments.count(token)
    penalties.apply(result, asking)
    return result


def by_formula(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """One row in Python's floats, token by token."""
    result, counts = logits.tolist(), Counter(output)
    for token, bias in params.logit_bias.items():
        result[token] += bias
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    for token, count in counts.items():
        result[token] -= params.presence_penalty + params.frequency_penalty * count
    return result


@settings(deadline=None, max_examples=300)
@given(rows=st.lists(ROW, min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_every_row_of_a_batch_follows_the_formulas(
    rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5
    expected = torch.tensor([by_formula(row, *asked) for row, asked in zip(logits, rows, strict=True)])
    torch.testing.assert_close(adjusted(logits, rows), expected, rtol=1e-6, atol=1e-5)


@settings(deadline=None, max_examples=200)
@given(
    bias=st.dictionaries(TOKENS, st.floats(-10, 10), min_size=1, max_size=5),
    penalty=st.floats(0.5, 2),
    prompt=st.lists(TOKENS, min_size=1, max_size=20),
    output=st.lists(TOKENS, max_size=20),
    seed=st.integers(0, 2**32),
)
def test_bias_and_repetition_penalty_are_transformers_in_its_order(
    bias: dict[int, float], penalty: float, prompt: list[int], output: list[int], seed: int
) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5
    tokens = torch.tensor([prompt + output])
    biased = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])(tokens, logits.clone())
    expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, biased)
    params = SamplingParams(max_tokens=99, logit_bias=bias, repetition_penalty=penalty)
    torch.testing.assert_close(adjusted(logits, [(params, prompt, output)]), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_what_only_the_prompt_has_is_not_penalised_for_having_been_generated(penalty: str) -> None:
    logits = torch.ones(1, VOCABULARY)
    params = SamplingParams(max_tokens=9, **{penalty: 1.0})  # type: ignore[arg-type]
    assert (adjusted(logits, [(params, [1, 2, 3], [])]) == 1).all()
    assert adjusted(logits, [(params, [1, 2, 3], [2])])[0, :4].tolist() == [1, 1, 0, 1]


def test_any_number_of_different_tokens_is_counted() -> None:
    params = SamplingParams(max_tokens=999, frequency_penalty=1.0)
    output = [*range(300), *range(100, 300), *range(250, 300)]
    [result] = adjusted(torch.zeros(1, 310), [(params, [305], output)]).tolist()
    assert result == [-1.0] * 100 + [-2.0] * 150 + [-3.0] * 50 + [0.0] * 10


def test_rows_that_ask_for_nothing_have_no_adjustments() -> None:
    plain = Sequence("request", [1, 2], CHOICE, SamplingParams(max_tokens=1), deliver=lambda _: None)
    assert penalties.adjustments_for(plain) is None


def test_other_rows_are_left_bit_for_bit() -> None:
    logits = torch.randn(3, VOCABULARY)
    plain, asking = SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, repetition_penalty=1.5)
    result = adjusted(logits, [(plain, [1], []), (asking, [1], []), (plain, [1], [])])
    assert torch.equal(result[[0, 2]], logits[[0, 2]])
    assert (result[1] != logits[1]).nonzero().tolist() == [[1]]
