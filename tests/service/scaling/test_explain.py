"""A choice is told in full, in values that JSON can carry."""

import json
import math

import pytest

from model_patches.geometry import RopeGeometry
from service.scaling.explain import explain
from service.scaling.policy import Policy, RopeWish

GEOMETRY = RopeGeometry(rotary_dim=64, theta=1e5, original_length=8192, native_length=8192)
POLICY = Policy(GEOMETRY)


def kinds(wish: RopeWish, policy: Policy = POLICY) -> list[str]:
    return [pair["kind"] for pair in explain(policy.choose(100, 50, wish), policy)["pairs"]]


def test_everything_about_a_choice() -> None:
    choice = POLICY.choose(12000, 3000)
    told = explain(choice, POLICY)
    pairs = told.pop("pairs")
    assert len(pairs) == 32
    assert told == {
        "scheme": "yarn",
        "mode": "static",
        "factor": 2.0,
        "growth": "stop",
        "attention_factor": pytest.approx(0.1 * math.log(2) + 1),
        "inv_freq": list(choice.plan.inv_freq),
        "native_length": 8192,
        "max_length": 32768,
        "plan_max_length": 16384,
        "reason": choice.reason,
        "max_tokens": 3000,
        "ladder": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0],
    }


@pytest.mark.parametrize("scheme", POLICY.schemes)
def test_it_survives_json(scheme: str) -> None:
    wish = RopeWish(scheme=scheme, factor=1.0 if scheme == "default" else 2.0)
    told = explain(POLICY.choose(100, 50, wish), POLICY)
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_wavelengths_and_rotations() -> None:
    pairs = explain(POLICY.choose(100, 50, RopeWish(scheme="linear", factor=2.0)), POLICY)["pairs"]
    assert pairs[0]["wavelength"] == pytest.approx(2 * math.pi)
    assert pairs[0]["rotations"] == pytest.approx(8192 / (2 * math.pi))
    assert pairs[16]["wavelength"] == pytest.approx(2 * math.pi * 1e5**0.5)
    assert all(pair["plan_wavelength"] == pytest.approx(2 * pair["wavelength"]) for pair in pairs)
    assert all(pair["rotations"] * pair["wavelength"] == pytest.approx(8192) for pair in pairs)


def test_the_native_plan_keeps_every_pair() -> None:
    assert set(kinds(RopeWish(mode="native"))) == {"kept"}


def test_linear_interpolates_every_pair() -> None:
    assert set(kinds(RopeWish(scheme="linear", factor=1.25))) == {"interpolated"}


@pytest.mark.parametrize("scheme", ["ntk", "dynamic"])
def test_ntk_keeps_the_fastest_and_interpolates_the_slowest_pair(scheme: str) -> None:
    assert kinds(RopeWish(scheme=scheme, factor=2.0)) == ["kept", *["blended"] * 30, "interpolated"]


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    """The ramp runs from pair 10 (about 32 turns within 8192 tokens) to pair 20 (about one turn)."""
    assert kinds(RopeWish(scheme="yarn", factor=2.0)) == ["kept"] * 11 + ["blended"] * 9 + ["interpolated"] * 12


def test_a_scaled_model_is_compared_at_its_own_factor_and_original_length() -> None:
    scaled = RopeGeometry(
        rotary_dim=64, theta=1.5e5, original_length=4096, native_length=131072, scheme="yarn", factor=32.0
    )
    policy = Policy(scaled)
    told = explain(policy.choose(100, 50), policy)
    assert (told["scheme"], told["factor"], told["mode"]) == ("yarn", 32.0, "native")
    assert {pair["kind"] for pair in told["pairs"]} == {"kept", "blended", "interpolated"}
    assert told["pairs"][0]["rotations"] == pytest.approx(4096 / (2 * math.pi))
