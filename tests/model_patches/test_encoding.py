"""ALiBi's slopes are those of the paper, and to the last float32 digits those that transformers builds."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from model_patches.encoding import FixedEncoding, alibi_slopes, mpt_slopes

HEADS = [1, 2, 3, 6, 8, 12, 16, 20, 32, 71, 112]


def series(heads: int, exponent: float = 8.0) -> list[float]:
    """2108.12409, section 3, for a power of two: from 2^(−8/n), with that ratio."""
    ratio = 2.0 ** (-exponent / heads)
    return [ratio**number for number in range(1, heads + 1)]


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_as_in_the_authors_code(heads: int) -> None:
    """Its `get_slopes`: of other counts than powers of two, the next lower one's and every other of the next higher."""
    lower = 1 << (heads.bit_length() - 1)
    expected = series(lower) if lower == heads else series(lower) + series(2 * lower)[0::2][: heads - lower]
    assert alibi_slopes(heads) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_as_bloom_has_them(heads: int) -> None:
    built = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)
    assert alibi_slopes(heads) == pytest.approx(built[:, 0, 1].tolist(), rel=1e-5)  # powers of a rounded base


@pytest.mark.parametrize("bias_max", [8, 16, 3])
@pytest.mark.parametrize("heads", HEADS)
def test_slopes_as_mpt_has_them(heads: int, bias_max: int) -> None:
    built = build_mpt_alibi_tensor(heads, 2, bias_max)
    slopes = mpt_slopes(heads, bias_max)
    assert slopes == pytest.approx((-built[:, 0, 0]).tolist(), rel=1e-6)
    higher = 1 << (heads - 1).bit_length()
    exact = series(higher, bias_max)
    assert slopes == pytest.approx(exact if higher == heads else (exact[1::2] + exact[::2])[:heads], rel=1e-13)


def test_a_power_of_two_has_the_papers_series_in_both() -> None:
    assert alibi_slopes(8) == mpt_slopes(8, 8) == tuple(0.5**number for number in range(1, 9))


def test_a_plan_without_rotation_is_equal_to_itself_however_far_it_reaches() -> None:
    encoding = FixedEncoding("alibi", 64, (0.5,))
    plan, longer = encoding.plan(64), encoding.plan(256)
    assert (plan.scheme, plan.factor, plan.max_length, plan.inv_freq) == ("alibi", 1.0, 64, ())
    assert plan == longer
    assert hash(plan) == hash(longer)
