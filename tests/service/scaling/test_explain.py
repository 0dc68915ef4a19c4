"""A choice is told in full, in values that JSON can carry."""

import json
import math
from dataclasses import replace

import pytest

from model_patches.geometry import LocalRope, RopeGeometry
from service.scaling.explain import explain
from service.scaling.policy import Policy, RopeWish

GEOMETRY = RopeGeometry(rotary_dim=64, theta=1e5, original_length=8192, native_length=8192)
POLICY = Policy(GEOMETRY)


def kinds(wish: RopeWish, policy: Policy = POLICY) -> list[str]:
    return [pair["kind"] for pair in explain(policy.choose(100, 50, wish), policy, 100)["pairs"]]


def told_rung(factor: float, max_length: int) -> dict[str, object]:
    return {"scheme": "yarn", "factor": factor, "max_length": max_length}


def test_everything_about_a_choice() -> None:
    choice = POLICY.choose(12000, 3000)
    told = explain(choice, POLICY, 12000)
    pairs = told.pop("pairs")
    assert len(pairs) == 32
    assert told == {
        "scheme": "yarn",
        "mode": "static",
        "factor": 2.0,
        "growth": "rerotate",
        "prefix_reuse": "same-plan",
        "prompt_tokens": 12000,
        "attention_factor": pytest.approx(0.1 * math.log(2) + 1),
        "inv_freq": list(choice.plan.inv_freq),
        "native_length": 8192,
        "max_length": 32768,
        "plan_max_length": 16384,
        "reason": choice.reason,
        "max_tokens": 3000,
        "rungs": [told_rung(2.0, 16384), told_rung(2.5, 20480), told_rung(3.0, 24576), told_rung(4.0, 32768)],
        "ladder": [
            {"scheme": "default", "factor": 1.0, "max_length": 8192},
            told_rung(1.25, 10240),
            told_rung(1.5, 12288),
            *told["rungs"],
        ],
        "local": None,
    }


@pytest.mark.parametrize("scheme", POLICY.schemes)
def test_it_survives_json(scheme: str) -> None:
    wish = RopeWish(scheme=scheme, factor=1.0 if scheme == "default" else 2.0)
    told = explain(POLICY.choose(100, 50, wish), POLICY, 100)
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_wavelengths_and_rotations() -> None:
    pairs = explain(POLICY.choose(100, 50, RopeWish(scheme="linear", factor=2.0)), POLICY, 100)["pairs"]
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
    told = explain(policy.choose(100, 50), policy, 100)
    assert (told["scheme"], told["factor"], told["mode"]) == ("yarn", 32.0, "native")
    assert {pair["kind"] for pair in told["pairs"]} == {"kept", "blended", "interpolated"}
    assert told["pairs"][0]["rotations"] == pytest.approx(4096 / (2 * math.pi))


def test_longrope_has_a_divisor_for_each_pair() -> None:
    geometry = RopeGeometry(
        rotary_dim=6,
        theta=1e4,
        original_length=4096,
        native_length=4096,
        scheme="longrope",
        factor=32.0,
        parameters={"short_factor": (1.0, 1.1, 0.9), "long_factor": (1.0, 8.0, 32.0)},
    )
    policy = Policy(geometry)
    assert kinds(RopeWish(), policy) == ["kept", "divided by 1.1", "divided by 0.9"]
    assert kinds(RopeWish(factor=32.0), policy) == ["kept", "divided by 8", "divided by 32"]


def test_layers_with_a_window_are_told_apart() -> None:
    policy = Policy(replace(GEOMETRY, local=LocalRope(("sliding_attention",), 1e4, 64)))
    told = explain(policy.choose(100, 50), policy, 100)
    assert told["local"] == {"layer_types": ["sliding_attention"], "theta": 1e4, "rotary_dim": 64}
    assert json.loads(json.dumps(told)) == told
