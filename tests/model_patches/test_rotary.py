"""Cos and sin agree with 50-digit arithmetic that starts from theta, up to position 2^20."""

from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from mpmath import mpf

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.plan import make_plan
from model_patches.rotary import FrequencyTable, PlanRotary, replace_rotary

DIM, THETA, ORIGINAL, FACTOR = 64, 500_000, 8192, 4
POSITIONS = (0, 1, ORIGINAL - 1, ORIGINAL, 2**17, 2**20)
LONG = tuple(1 + 0.37 * pair for pair in range(DIM // 2))
SHORT = tuple(1 + 0.01 * pair for pair in range(DIM // 2))

Exact = tuple[list[Any], Any]  # inverse frequencies and attention factor, of 50 digits


def powers(base: Any) -> list[Any]:
    return [mpf(base) ** (-mpf(2 * pair) / DIM) for pair in range(DIM // 2)]


def default() -> Exact:
    return powers(THETA), mpf(1)


def ntk() -> Exact:
    return powers(mpf(THETA) * mpf(FACTOR) ** (mpf(DIM) / (DIM - 2))), mpf(1)


def yarn() -> Exact:
    fast, slow = (
        DIM * mpmath.log(ORIGINAL / (turns * 2 * mpmath.pi)) / (2 * mpmath.log(THETA)) for turns in (mpf(32), mpf(1))
    )
    low, high = mpmath.floor(fast), mpmath.ceil(slow)
    kept = [1 - min(max((pair - low) / (high - low), mpf(0)), mpf(1)) for pair in range(DIM // 2)]
    inv_freq = [(1 - g) * t / FACTOR + g * t for g, t in zip(kept, powers(THETA), strict=True)]
    return inv_freq, mpf(1) / 10 * mpmath.log(FACTOR) + 1


def llama3() -> Exact:
    kept = [min(max((ORIGINAL * t / (2 * mpmath.pi) - 1) / 3, mpf(0)), mpf(1)) for t in powers(THETA)]
    return [(1 - g) * t / FACTOR + g * t for g, t in zip(kept, powers(THETA), strict=True)], mpf(1)


def longrope() -> Exact:
    inv_freq = [t / mpf(e) for t, e in zip(powers(THETA), LONG, strict=True)]
    return inv_freq, mpmath.sqrt(1 + mpmath.log(FACTOR) / mpmath.log(ORIGINAL))


SCHEMES: dict[str, Callable[[], Exact]] = {
    "default": default,
    "ntk": ntk,
    "yarn": yarn,
    "llama3": llama3,
    "longrope": longrope,
}


@pytest.fixture
def table() -> FrequencyTable:
    """A row for each scheme, in the order of `SCHEMES`."""
    frequencies = FrequencyTable(DIM // 2, torch.device("cpu"))
    for row, scheme in enumerate(SCHEMES):
        options = {"short_factor": SHORT, "long_factor": LONG} if scheme == "longrope" else {}
        own = scheme if scheme == "longrope" else "default"
        factor = FACTOR if scheme == "longrope" else 1.0
        geometry = RopeGeometry(DIM, THETA, ORIGINAL, ORIGINAL, own, factor, options)
        assert frequencies.row(make_plan(geometry, scheme, FACTOR, FACTOR * ORIGINAL)) == row
    return frequencies


def waves(
    table: FrequencyTable, positions: tuple[int, ...], rows: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    position_ids = torch.tensor([[positions], [rows]])
    cos, sin = PlanRotary(table)(torch.empty(0, dtype=dtype), position_ids)
    assert cos.shape == sin.shape == (1, len(positions), DIM)
    assert cos.dtype == sin.dtype == dtype
    return cos[0], sin[0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_angles_are_exact_at_every_position(table: FrequencyTable, scheme: str) -> None:
    cos, sin = waves(table, POSITIONS, (list(SCHEMES).index(scheme),) * len(POSITIONS))
    with mpmath.workdps(50):
        inv_freq, factor = SCHEMES[scheme]()
        for row, position in enumerate(POSITIONS):
            expected_cos = [float(factor * mpmath.cos(position * f)) for f in inv_freq]
            expected_sin = [float(factor * mpmath.sin(position * f)) for f in inv_freq]
            assert cos[row].tolist() == pytest.approx(expected_cos * 2, rel=0, abs=1e-6), f"cos at {position}"
            assert sin[row].tolist() == pytest.approx(expected_sin * 2, rel=0, abs=1e-6), f"sin at {position}"


def test_every_token_has_its_own_position_and_plan(table: FrequencyTable) -> None:
    rows = tuple(range(len(SCHEMES)))
    positions = tuple(2**20 - 7 * row for row in rows)
    together = waves(table, positions, rows)
    for row, position in zip(rows, positions, strict=True):
        alone = waves(table, (position,), (row,))
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_waves_are_rounded_from_float32(table: FrequencyTable, dtype: torch.dtype) -> None:
    rows = (2,) * len(POSITIONS)
    for wide, narrow in zip(waves(table, POSITIONS, rows), waves(table, POSITIONS, rows, dtype), strict=True):
        assert torch.equal(wide.to(dtype), narrow)


def test_plans_that_rotate_alike_share_a_row(table: FrequencyTable) -> None:
    geometry = RopeGeometry(DIM, THETA, ORIGINAL, ORIGINAL)
    assert table.row(make_plan(geometry, "yarn", FACTOR, 1)) == list(SCHEMES).index("yarn")
    assert table.row(make_plan(geometry, "linear", 1.0, ORIGINAL)) == list(SCHEMES).index("default")
    assert table.row(make_plan(geometry, "linear", 2.0, ORIGINAL)) == len(SCHEMES)


class OneAngleAPair(torch.nn.Module):
    """As transformers' rotary modules, which differ in where they put a pair's cos and sin."""

    inv_freq: torch.Tensor

    def __init__(self, places: list[int]) -> None:
        super().__init__()
        self.places = places
        self.register_buffer("inv_freq", torch.tensor([10.0 ** (-pair / 4) for pair in range(4)]))

    def forward(self, _x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (position_ids[..., None] * self.inv_freq)[..., self.places]
        return angles.cos(), angles.sin()


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3]])
def test_cos_and_sin_lie_where_the_modules_that_a_model_was_written_for_have_them(places: list[int]) -> None:
    model = torch.nn.Module()
    model.rotary_emb = original = OneAngleAPair(places)
    geometry = RopeGeometry(8, 10.0, ORIGINAL, ORIGINAL)
    frequencies = FrequencyTable(4, torch.device("cpu"))
    row = frequencies.row(make_plan(geometry, "default", 1.0, ORIGINAL))
    replace_rotary(model, frequencies, geometry)
    positions = torch.tensor([[3, 7]])
    ours = model.rotary_emb(torch.empty(0), torch.stack([positions, torch.full_like(positions, row)]))
    for given, expected in zip(ours, original(torch.empty(0), positions), strict=True):
        torch.testing.assert_close(given, expected)


def test_a_model_that_rotates_more_than_its_config_says_is_refused() -> None:
    model = torch.nn.Module()
    model.rotary_emb = OneAngleAPair([0, 1, 2, 3, 0, 1, 2, 3])
    with pytest.raises(UnsupportedModelError, match=r"OneAngleAPair gives 8 columns.*rotary dimension 4"):
        replace_rotary(model, FrequencyTable(2, torch.device("cpu")), RopeGeometry(4, 10.0, ORIGINAL, ORIGINAL))
