"""Tokens chosen from logits against float64, at every instruction set that this CPU has, over many blocks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_patches.kernels import ops
from model_patches.kernels.ops import Level

pytestmark = pytest.mark.usefixtures("operators")

ROUNDING = 1e-4  # of cumulative float32 weights, over their total
DRAWS = (0.0, 0.03, 0.31, 0.62, 0.97, float(np.nextafter(1.0, 0.0)))
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Filters:
    """How one row is sampled."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from([0.25, 1.0, 1.75]),
    top_k=st.sampled_from([1, 2, 20, 60, 500, 10**6]),
    top_p=st.sampled_from([0.125, 0.5, 0.9375, 1.0]),
    min_p=st.sampled_from([0.0, 0.0625, 0.5]),
)


def choose(logits: torch.Tensor, filters: dict[int, Filters], draws: dict[int, float]) -> list[int]:
    """A token for each row; rows without filters are greedy."""
    size, of = logits.shape[-1], filters.values()
    return ops.choose(
        logits,
        torch.tensor(list(filters), dtype=torch.int64),
        torch.tensor([one.temperature for one in of]),
        torch.tensor([min(one.top_k, size) for one in of], dtype=torch.int64),
        torch.tensor([one.top_p for one in of]),
        torch.tensor([one.min_p for one in of]),
        torch.tensor([draws[row] for row in filters], dtype=torch.float64),
    ).tolist()


def kept(logits: torch.Tensor, filters: Filters, slack: float) -> Numbers:
    """What each token weighs after the filters, float64; with `slack` below 0 they keep less, above 0 more."""
    values = logits.double().numpy() / filters.temperature
    weights = np.exp(values - values.max())
    order = np.argsort(-weights, kind="stable")
    kth = np.sort(logits.numpy())[::-1][min(filters.top_k, len(logits)) - 1]
    inside = logits.numpy() >= kth
    if filters.top_p < 1:
        left = np.where(inside, weights, 0.0)[order]
        before = np.empty(len(order))
        before[order] = (np.cumsum(left) - left) / left.sum()
        inside &= (before < filters.top_p + slack) | (before == 0)
    return np.where(inside & (weights >= filters.min_p * (1 - slack)), weights, 0.0)


def is_right(token: int, logits: torch.Tensor, filters: Filters, draw: float) -> bool:
    """Whether a token is what a draw means, were all rounding off by no more than `ROUNDING`."""
    most, least = (kept(logits, filters, slack) for slack in (ROUNDING, -ROUNDING))
    if most[token] == 0:
        return False
    # Which tokens stay is uncertain by as much as the two differ in weight.
    unsure = (most.sum() - least.sum()) / least.sum() + ROUNDING
    end = np.cumsum(most)[token] / most.sum()
    start = end - most[token] / most.sum()
    return bool(start - unsure <= draw <= end + unsure)


@settings(deadline=None, max_examples=400)
@given(
    size=st.integers(1, 4000),
    spread=st.sampled_from([0.0, 0.5, 4.0, 20.0]),
    quarters=st.booleans(),
    ruled_out=st.sampled_from([0.0, 0.5, 0.99]),
    filters=FILTERS,
    level=st.sampled_from(list(Level)),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_each_draw_chooses_the_token_that_float64_chooses(
    size: int,
    spread: float,
    quarters: bool,
    ruled_out: float,
    filters: Filters,
    level: Level,
    threads: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = spread * torch.randn(size, generator=generator)
    row = (4 * row).round() / 4 if quarters else row  # with equals among them
    row[torch.rand(size, generator=generator) < ruled_out] = -torch.inf
    row[seed % size] = 1.0  # something can be chosen
    ops.limit_level(level)
    torch.set_num_threads(threads)
    rows = range(len(DRAWS))
    chosen = choose(row.expand(len(DRAWS), -1).contiguous(), dict.fromkeys(rows, filters), dict(enumerate(DRAWS)))
    for token, draw in zip(chosen, DRAWS, strict=True):
        assert is_right(token, row, filters, draw), (token, draw)


@settings(deadline=None, max_examples=100)
@given(size=st.integers(1, 1000), level=st.sampled_from(list(Level)), seed=st.integers(0, 99))
def test_rows_that_are_not_sampled_take_the_first_of_the_likeliest(size: int, level: Level, seed: int) -> None:
    logits = torch.randint(-9, 9, (5, size), generator=torch.Generator().manual_seed(seed)).float()
    ops.limit_level(level)
    sampled = {row: Filters(1.0, 10**6, 1.0, 0.0) for row in (1, 3)}
    chosen = choose(logits, sampled, dict.fromkeys(sampled, 0.5))
    likeliest = logits.numpy().argmax(axis=-1).tolist()
    assert [chosen[row] for row in (0, 2, 4)] == [likeliest[row] for row in (0, 2, 4)]


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize(
    "filters",
    [
        Filters(1.0, 2, 1.0, 0.0),
        Filters(1.0, 5, 0.5, 0.1),
        Filters(0.5, 10**6, 0.9, 0.0),
        Filters(1.0, 10**6, 1.0, 0.0),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [slice(None), slice(70, 90), slice(0, 1), slice(0, 250)])
def test_a_broken_row_gets_a_token_of_the_vocabulary_and_spoils_no_other(
    level: Level, filters: Filters, value: float, where: slice
) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    ops.limit_level(level)
    whole = choose(logits, {2: filters}, {2: 0.4})
    logits[:2, where] = value
    chosen = choose(logits, {0: filters, 2: filters}, {0: 0.4, 2: 0.4})
    assert all(0 <= token < 300 for token in chosen)
    assert chosen[2] == whole[2]


def test_a_temperature_without_end_brings_back_nothing_that_was_ruled_out() -> None:
    logits = torch.full((1, 100), -torch.inf)
    logits[0, 40:42] = torch.tensor([0.0, 5.0])
    hot = Filters(3e38, 10**6, 1.0, 0.0)
    assert [choose(logits, {0: hot}, {0: draw}) for draw in (0.0, 0.4, 0.6, 0.999)] == [[40], [40], [41], [41]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampled": torch.tensor([3])}, "sampled rows"),
        ({"sampled": torch.tensor([-1])}, "sampled rows"),
        ({"top_k": torch.ones(2, dtype=torch.int64)}, "for each sampled row"),
        ({"draws": torch.ones(1)}, "for each sampled row"),
        ({"top_k": torch.zeros(1, dtype=torch.int64)}, "above 0"),
        ({"temperature": torch.zeros(1)}, "above 0"),
        ({"logits": torch.ones(3, 8).T}, "without gaps"),
        ({"logits": torch.ones(3, 0)}, "vocabulary"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    given_ones = {
        "logits": torch.ones(3, 8),
        "sampled": torch.tensor([0]),
        "temperature": torch.ones(1),
        "top_k": torch.ones(1, dtype=torch.int64),
        "top_p": torch.ones(1),
        "min_p": torch.zeros(1),
        "draws": torch.zeros(1, dtype=torch.float64),
    }
    with pytest.raises(RuntimeError, match=message):
        ops.choose(**(given_ones | change))
