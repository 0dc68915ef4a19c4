"""A plan holds what a scheme computed, and no scheme can put into one what cannot rotate."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model_patches import plan as plans
from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.plan import make_plan
from model_patches.schemes import SCHEMES, schemes_for

GEOMETRY = RopeGeometry(rotary_dim=8, theta=1e4, original_length=2048, native_length=2048)
SOUND = [1.0, 0.1, 0.01, 0.001]


@pytest.fixture
def scheme_returning(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(returned: Any) -> None:
        known: Mapping[str, Any] = {"odd": lambda _geometry, _factor, _length: returned}
        monkeypatch.setattr(plans, "known_schemes", lambda: known)

    return install


@pytest.mark.parametrize("scheme", schemes_for(GEOMETRY))
def test_a_plan_is_what_its_scheme_computed(scheme: str) -> None:
    frequencies = SCHEMES[scheme](GEOMETRY, 2.0, 4096)
    plan = make_plan(GEOMETRY, scheme, 2.0, 4096)
    assert (plan.scheme, plan.factor, plan.max_length) == (scheme, 2.0, 4096)
    assert plan.inv_freq == tuple(frequencies.inv_freq.tolist())
    assert plan.attention_factor == frequencies.attention_factor


def test_plans_that_rotate_alike_are_equal() -> None:
    plan = make_plan(GEOMETRY, "ntk", 2.0, 4096)
    dynamic = make_plan(GEOMETRY, "dynamic", 1.0, 4096)
    assert plan == replace(plan, scheme="dynamic", factor=3.0, max_length=1)
    assert (plan == dynamic) == (plan.inv_freq == dynamic.inv_freq)
    assert plan != make_plan(GEOMETRY, "ntk", 2.5, 4096)
    assert plan != replace(plan, attention_factor=1.1)


def test_an_unknown_scheme_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="riddle"):
        make_plan(GEOMETRY, "riddle", 2.0, 4096)


@pytest.mark.parametrize(
    "returned",
    [
        (SOUND, 1.0),
        [tuple(SOUND), 1],
        (np.array(SOUND, dtype=np.float64), np.float32(1.0)),
        (torch.tensor(SOUND, dtype=torch.float64), torch.tensor(1.0)),
    ],
    ids=["list", "pair in a list", "arrays", "tensors"],
)
def test_numbers_of_any_kind_are_taken(scheme_returning: Any, returned: Any) -> None:
    scheme_returning(returned)
    plan = make_plan(GEOMETRY, "odd", 2.0, 4096)
    assert plan.inv_freq == tuple(SOUND)
    assert plan.attention_factor == 1.0
    assert {type(value) for value in (*plan.inv_freq, plan.attention_factor)} == {float}


def test_narrow_numbers_are_widened(scheme_returning: Any) -> None:
    scheme_returning((np.array(SOUND, dtype=np.float32), 1.0))
    assert make_plan(GEOMETRY, "odd", 2.0, 4096).inv_freq == pytest.approx(SOUND, rel=1e-7)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "None instead of inverse frequencies and an attention factor"),
        (0.5, "0.5 instead of"),
        ((SOUND,), r"\(\[1.0, .*\],\) instead of"),
        ((SOUND, 1.0, 1.0), "instead of"),
        ((SOUND[:3], 1.0), r"inverse frequencies of shape \(3,\), not one for each of 4 pairs"),
        ((SOUND * 2, 1.0), r"shape \(8,\)"),
        (([SOUND], 1.0), r"shape \(1, 4\)"),
        ((0.5, 1.0), r"shape \(\)"),
        (([1.0, math.nan, 0.01, 0.001], 1.0), "the inverse frequency nan for pair 1"),
        (([1.0, 0.1, math.inf, 0.001], 1.0), "the inverse frequency inf for pair 2"),
        (([1.0, 0.1, 0.01, 0.0], 1.0), "the inverse frequency 0.0 for pair 3"),
        (([-1.0, 0.1, 0.01, 0.001], 1.0), "the inverse frequency -1.0 for pair 0"),
        ((["1.0", "0.1", "0.01", "x"], 1.0), r"inverse frequencies \['1.0', .*, which are not real numbers"),
        (([1j, 0.1, 0.01, 0.001], 1.0), "which are not real numbers"),
        (([[1.0], 0.1, 0.01, 0.001], 1.0), "which are not real numbers"),
        (({"a": 1.0}, 1.0), "inverse frequencies {'a': 1.0}, which are not real numbers"),
        ((torch.tensor(SOUND, requires_grad=True), 1.0), "which are not real numbers"),
        ((torch.tensor(SOUND).bfloat16(), 1.0), "which are not real numbers"),
        ((SOUND, 0.0), "the attention factor 0.0; it must be"),
        ((SOUND, -1.0), "the attention factor -1.0"),
        ((SOUND, math.nan), "the attention factor nan"),
        ((SOUND, math.inf), "the attention factor inf"),
        ((SOUND, [1.0]), r"the attention factor \[1.0\]; it must be one number"),
        ((SOUND, None), "the attention factor None, which is not a real number"),
        ((SOUND, "1.0"), "the attention factor '1.0', which is not a real number"),
    ],
)
def test_what_cannot_rotate_is_refused(scheme_returning: Any, returned: Any, message: str) -> None:
    scheme_returning(returned)
    with pytest.raises(UnsupportedModelError, match=rf"scheme 'odd' returned .*{message}"):
        make_plan(GEOMETRY, "odd", 2.0, 4096)


def test_a_built_in_schemes_numbers_are_checked_too() -> None:
    """A config can hold options that make nonsense of a formula."""
    shrunk = RopeGeometry(8, 1e4, 2048, 4096, "yarn", 2.0, {"attention_factor": -0.5})
    with pytest.raises(UnsupportedModelError, match=r"scheme 'yarn' returned the attention factor -0\.5"):
        make_plan(shrunk, "yarn", 2.0, 4096)
