"""The sampler: the same tokens with the same probabilities as transformers' own warpers, and nothing shared by rows."""

from dataclasses import replace
from itertools import pairwise
from math import nextafter
from random import Random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model_patches.kernels import build, ops
from service.core import SamplingParams, Sequence
from service.engine import sampler
from service.engine.grammar import Grammar
from service.scaling.policy import Policy
from tests.fakes import GEOMETRY
from tests.recording import Tape

CPU = torch.device("cpu")
CHOICE = Policy(GEOMETRY).choose(1, 1)
ALMOST_ONE = nextafter(1.0, 0.0)  # the largest number that a random stream can draw
TOLERANCE = 1e-5  # of cumulative float32 probabilities


class FixedDraw(Random):
    """Stands in for a sequence's random stream."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


def sequence(params: SamplingParams, draw: float | None = None) -> Sequence:
    """A sequence that draws as its seed says, or always the same."""
    made = Sequence("request", [0], CHOICE, params, deliver=lambda _: None)
    if draw is not None:
        made.random = FixedDraw(draw)
    return made


def choose(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """What torch's operators choose; and where there are the C++ ones, that they choose the same."""
    tensors = sampler.prepare(sequences, logits.shape[-1], logits.device)
    chosen = sampler.sample(logits, tensors)
    if build.load():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "are_loaded", lambda: False)
            assert sampler.sample(logits, tensors) == chosen
    return chosen


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [vocabulary] by transformers' warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    warped: torch.Tensor = warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None])  # type: ignore[arg-type]
    return warped[0].double().softmax(dim=-1)


def near_an_edge(logits: torch.Tensor, params: SamplingParams) -> bool:
    """Whether rounding alone may decide if a token stays: its mass, or its share of the likeliest, is the limit."""
    probabilities = (logits.double() / params.temperature).softmax(dim=-1).sort(descending=True).values
    kept = probabilities[: params.top_k or None]
    mass_before = (kept / kept.sum()).cumsum(dim=-1) - kept / kept.sum()
    edges = [*(mass_before - params.top_p).tolist(), *(kept / kept[0] - params.min_p).tolist()]
    return any(abs(edge) < TOLERANCE for edge in edges)


# Multiples of 1/8, no two alike: which of two equal logits a filter keeps is nobody's promise.
EIGHTHS = st.lists(st.integers(-80, 80), min_size=1, max_size=24, unique=True)
LOGITS = EIGHTHS.map(lambda eighths: torch.tensor(eighths) / 8)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.floats(0.3, 2.0),
    top_k=st.integers(0, 30),
    top_p=st.just(1.0) | st.floats(0.05, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
)


@settings(deadline=None, max_examples=300)
@given(logits=LOGITS, params=PARAMS)
def test_each_token_has_the_share_of_draws_that_transformers_gives_it(
    logits: torch.Tensor, params: SamplingParams
) -> None:
    assume(not near_an_edge(logits, params))
    probabilities = reference(logits, params)
    borders = [0.0, *probabilities.cumsum(dim=-1).tolist()]
    expected = []
    for token, (start, end) in enumerate(pairwise(borders)):
        if end - start > 2 * TOLERANCE:
            expected += [(draw, token) for draw in (start + TOLERANCE, (start + end) / 2, end - TOLERANCE)]
    chosen = choose(logits.expand(len(expected), -1), [sequence(params, draw) for draw, _ in expected])
    assert chosen == [token for _, token in expected]


@settings(deadline=None, max_examples=300)
@given(logits=LOGITS, params=PARAMS)
def test_no_draw_chooses_a_token_that_was_filtered_out(logits: torch.Tensor, params: SamplingParams) -> None:
    assume(not near_an_edge(logits, params))
    kept = reference(logits, params).nonzero()[:, 0].tolist()
    draws = [0.0, ALMOST_ONE, 0.5, nextafter(0.0, 1.0)]
    chosen = choose(logits.expand(len(draws), -1), [sequence(params, draw) for draw in draws])
    assert chosen[0] == kept[0]
    assert set(chosen) <= set(kept)


@pytest.mark.parametrize("draw", [0.0, 0.5, ALMOST_ONE])
def test_a_draw_at_either_end_chooses_a_token_that_can_be(draw: float) -> None:
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 4:6] = 1.0
    chosen = choose(logits, [sequence(SamplingParams(max_tokens=1), draw)])
    assert chosen == [4 if draw < 0.5 else 5]


def test_equal_logits_share_what_top_p_leaves() -> None:
    draws = [(number + 0.5) / 64 for number in range(64)]
    params = SamplingParams(max_tokens=1, top_p=0.5)
    chosen = choose(torch.zeros(64, 4), [sequence(params, draw) for draw in draws])
    assert sorted(chosen.count(token) for token in range(4)) == [0, 0, 32, 32]


@pytest.mark.parametrize("draw", [0.0, 0.5, ALMOST_ONE])
def test_the_least_top_p_leaves_the_likeliest_token(draw: float) -> None:
    params = SamplingParams(max_tokens=1, top_p=nextafter(0.0, 1.0))
    assert choose(torch.tensor([[0.0, 2.0, 1.0]]), [sequence(params, draw)]) == [1]


@pytest.mark.parametrize("temperature", [nextafter(0.0, 1.0), 1e-45, 1e-38])
def test_the_least_temperatures_choose_the_likeliest_token(temperature: float) -> None:
    params = SamplingParams(max_tokens=1, temperature=temperature)
    assert choose(torch.tensor([[1.0, 30.0, 20.0, -5.0]]), [sequence(params, 0.5)]) == [1]


def test_top_k_keeps_all_that_equal_the_last_kept() -> None:
    draws = [(number + 0.5) / 60 for number in range(60)]
    params = SamplingParams(max_tokens=1, top_k=1)
    chosen = choose(torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0]).expand(60, -1), [sequence(params, draw) for draw in draws])
    assert [chosen.count(token) for token in range(5)] == [0, 20, 20, 20, 0]


def test_a_top_k_above_the_vocabulary_keeps_all() -> None:
    draws = [(number + 0.5) / 60 for number in range(60)]
    params = SamplingParams(max_tokens=1, top_k=1000)
    chosen = choose(torch.zeros(60, 3), [sequence(params, draw) for draw in draws])
    assert [chosen.count(token) for token in range(3)] == [20, 20, 20]


ROWS = st.lists(st.tuples(PARAMS, st.booleans(), st.floats(0, ALMOST_ONE)), min_size=2, max_size=6)


@settings(deadline=None, max_examples=300)
@given(rows=ROWS, seed=st.integers(0, 2**32))
def test_a_rows_choice_does_not_depend_on_the_other_rows(
    rows: list[tuple[SamplingParams, bool, float]], seed: int
) -> None:
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(seed)) * 3
    sequences = [
        sequence(replace(params, temperature=0.0) if greedy else params, draw) for params, greedy, draw in rows
    ]
    alone = [choose(logits[row : row + 1], [one])[0] for row, one in enumerate(sequences)]
    assert choose(logits, sequences) == alone


def test_a_row_without_top_p_keeps_its_unlikeliest_tokens_beside_a_row_with_it() -> None:
    """In a vocabulary so large that rounding lets the cumulative probability reach 1 too early."""
    logits = torch.randn(1, 49152, generator=torch.Generator().manual_seed(4))
    probabilities = logits[0].double().softmax(dim=-1)
    unlikeliest = probabilities.argsort()[:8]
    draws = (probabilities.cumsum(dim=-1) - probabilities / 2)[unlikeliest].tolist()
    sampled = [sequence(SamplingParams(max_tokens=1), draw) for draw in draws]
    alone = choose(logits.expand(8, -1), sampled)
    beside = sequence(SamplingParams(max_tokens=1, top_p=0.5), 0.5)
    assert choose(logits.expand(9, -1), [*sampled, beside])[:8] == alone


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    logits = torch.zeros(1, 100)

    def tokens(seed: int | None) -> list[int]:
        one = sequence(SamplingParams(max_tokens=1, seed=seed))
        return [choose(logits, [one])[0] for _ in range(20)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(None) != tokens(None)


def test_greedy_rows_take_the_likeliest_token_beside_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [3.0, 0.0, 1.0], [0.0, 1.0, 5.0]])
    greedy, sampled = SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1, temperature=2.0)
    chosen = choose(logits, [sequence(greedy), sequence(sampled, ALMOST_ONE), sequence(greedy)])
    assert chosen == [1, 2, 2]


def test_greedy_rows_draw_no_random_numbers() -> None:
    one = sequence(SamplingParams(max_tokens=1, temperature=0.0, seed=3))
    assert sampler.prepare([one], 10, CPU) is None
    assert one.random.random() == Random(3).random()


def test_each_token_has_a_number_of_its_own_however_often_it_is_asked_for() -> None:
    one = sequence(SamplingParams(max_tokens=1, seed=3))
    stream = Random(3)
    numbers = [stream.random() for _ in range(3)]

    def draws(rows: int) -> list[float]:
        one.draft = [0] * (rows - 1)
        made = sampler.prepare([one] * rows, 10, CPU)
        assert made is not None
        values: list[float] = made.draws[:, 0].tolist()
        return values

    assert (draws(1), draws(2), draws(1)) == (numbers[:1], numbers[:2], numbers[:1])
    one.drawn.popleft()  # the token was chosen
    assert draws(2) == numbers[1:]


def test_end_tokens_are_ruled_out_until_min_tokens_and_only_in_their_own_row() -> None:
    ends = frozenset({1, 3})
    early = sequence(SamplingParams(max_tokens=9, min_tokens=2, end_token_ids=ends))
    early.output = [7]
    due = sequence(SamplingParams(max_tokens=9, min_tokens=2, end_token_ids=ends))
    due.output = [7, 7]
    ignoring = sequence(SamplingParams(max_tokens=9, min_tokens=2))
    logits = torch.ones(3, 5)
    sampler.forbid_early_ends(logits, [early, due, ignoring])
    assert logits.tolist() == [[1, -torch.inf, 1, -torch.inf, 1], [1] * 5, [1] * 5]


def test_end_tokens_of_a_row_with_a_grammar_are_left_to_it() -> None:
    compiled = Grammar.__new__(Grammar)  # only whether there is one counts here
    params = SamplingParams(max_tokens=9, min_tokens=2, end_token_ids=frozenset({1}), grammar=compiled)
    logits = torch.ones(1, 5)
    sampler.forbid_early_ends(logits, [sequence(params)])
    assert logits.tolist() == [[1] * 5]


def test_an_end_token_that_is_ruled_out_is_not_chosen_even_if_it_is_the_likeliest() -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=9, min_tokens=1, end_token_ids=frozenset({2}), temperature=temperature)
        one = sequence(params, 0.5)
        logits = torch.tensor([[0.0, 1.0, 50.0]])
        sampler.forbid_early_ends(logits, [one])
        assert choose(logits, [one]) == [1]


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, top_k=3, top_p=0.5)])
def test_what_is_drawn_is_not_asked_for_before_all_of_it_is_computed(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA each question would stop the host until the device has caught up."""
    monkeypatch.setattr(ops, "are_loaded", lambda: False)
    monkeypatch.setattr(sampler, "_likeliest", lambda logits: logits.argmax(dim=-1))  # numpy has these two on a CPU
    monkeypatch.setattr(sampler, "_falling", lambda logits: logits.sort(dim=-1, descending=True).values)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    greedy = sequence(SamplingParams(max_tokens=1, temperature=0.0))
    sequences = [sequence(params, 0.1), greedy, sequence(params, 0.9), greedy]
    tensors = sampler.prepare(sequences, 50, CPU)
    with pytest.MonkeyPatch.context() as patch, Tape():
        patch.setattr(torch.Tensor, "tolist", lambda chosen: chosen)
        chosen = sampler.sample(logits, tensors)
    assert torch.equal(torch.as_tensor(chosen), torch.tensor(sampler.sample(logits, tensors)))
