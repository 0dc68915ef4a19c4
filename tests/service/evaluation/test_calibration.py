"""Calibration: what is tried, what is chosen, and the policy file that comes of it."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from model_patches.geometry import RopeGeometry
from service.evaluation import calibration, likelihood
from service.evaluation.bootstrap import paired_bootstrap
from service.evaluation.calibration import CURRENT, UNSCALED, Finding
from service.evaluation.errors import EvaluationError
from service.evaluation.ladders import Candidate
from service.evaluation.policy_text import policy_text
from service.scaling.options import ModeRule, RopePolicy
from service.scaling.policy import Policy
from service.scaling.policy_file import load_options
from tests.service.evaluation.tiny import TinyBench

GEOMETRY = RopeGeometry(rotary_dim=8, theta=10000.0, original_length=64, native_length=64)


def test_every_scheme_is_tried_at_every_rung_up_to_the_longest_length() -> None:
    tried = calibration.candidates(Policy(GEOMETRY), ["yarn", "ntk"], None, 150)
    assert [(c.scheme, c.factor, c.covers) for c in tried[:5]] == [
        ("yarn", 1.25, 80),
        ("yarn", 1.5, 96),
        ("yarn", 2.0, 128),
        ("yarn", 150 / 64, 150),
        ("ntk", 1.25, 80),
    ]
    assert len(tried) == 8
    given = calibration.candidates(Policy(GEOMETRY), ["yarn"], (1.2, 3.0, 9.0), 200)
    assert [c.covers for c in given] == [76, 192, 200]


def test_what_cannot_be_calibrated_is_refused() -> None:
    with pytest.raises(EvaluationError, match="64 is within the native length 64"):
        calibration.candidates(Policy(GEOMETRY), ["yarn"], None, 64)
    with pytest.raises(EvaluationError, match="'default' is not for this model: known are dynamic"):
        calibration.candidates(Policy(GEOMETRY), ["default"], None, 128)
    scaled = RopeGeometry(8, 10000.0, original_length=64, native_length=128, scheme="yarn", factor=2.0)
    with pytest.raises(EvaluationError, match="scaled already"):
        calibration.candidates(Policy(scaled), ["yarn"], None, 256)


def test_the_chosen_ladder_is_the_best_on_these_documents(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells", documents=4)
    candidates = calibration.candidates(tried.policy, ["yarn", "ntk", "linear"], None, 128)
    plans = calibration.wanted(candidates, tried.policy)
    ledger = tried.compute(calibration.jobs(tried.bench, plans))
    findings = calibration.calibrate(tried.bench, ledger, plans)
    assert [finding.length for finding in findings] == [80, 96, 128]
    scored = likelihood.scores(tried.bench, ledger, plans, 128)
    current = tried.policy.choose(95, 1).plan
    for finding in findings:
        here = {
            name: np.mean([row.mean() for row in rows])
            for (name, length), rows in scored.items()
            if length == finding.length
        }
        assert finding.nll == pytest.approx(here[finding.chosen])
        assert here[finding.best] == min(cost for name, cost in here.items() if isinstance(name, Candidate))
        assert finding.differences[UNSCALED].mean == pytest.approx(finding.nll - here[UNSCALED])
        assert finding.differences[CURRENT].mean == pytest.approx(finding.nll - here[CURRENT])
        assert finding.differences[UNSCALED].documents == 4
    assert current.factor == 1.5
    # At the last length only rungs that reach it are there to choose from, so the best of them serves it.
    assert findings[-1].chosen == findings[-1].best


def finding(length: int, scheme: str, factor: float, covers: int) -> Finding:
    chosen = Candidate(scheme, factor, covers)
    return Finding(length, chosen, 2.5, chosen, {})


def test_the_policy_file_is_taken_and_gives_each_length_its_winner(tmp_path: Path) -> None:
    found = [finding(80, "ntk", 1.5, 96), finding(96, "ntk", 1.5, 96), finding(150, "yarn", 150 / 64, 150)]
    options = RopePolicy(
        scheme="linear", growth="reprefill", mode=(ModeRule(prompt_tokens=9, mode="native"), ModeRule(mode="static"))
    )
    file = tmp_path / "policy.toml"
    file.write_text(policy_text(found, options, {"model": "a\nb"}))
    assert "# model: a b\n" in file.read_text()
    loaded = load_options(file, {})
    assert (loaded.growth, loaded.scheme, loaded.max_length) == ("reprefill", None, 150)
    assert loaded.mode == options.mode
    policy = Policy(GEOMETRY, loaded)
    assert [(rung.scheme, rung.covers) for rung in policy.rungs] == [("default", 64), ("ntk", 96), ("yarn", 150)]
    for each in found:
        plan = Policy(GEOMETRY, load_options(file, {"mode": ()})).choose(each.length - 1, 1).plan
        assert (plan.scheme, plan.factor) == (each.chosen.scheme, each.chosen.factor)


def test_the_policy_file_says_by_how_much_and_how_sure() -> None:
    chosen = Candidate("yarn", 2.0, 128)
    several = paired_bootstrap([1.0, 1.1, 1.0], [1.5, 1.7, 1.4])
    text = policy_text([Finding(128, chosen, 1.033, chosen, {UNSCALED: several})], RopePolicy(), {})
    assert "# 128 tokens: 1.033 under yarn 2" in text
    assert f"{several} against unscaled (better in 100.0% of resamples)" in text
    alone = policy_text(
        [Finding(128, chosen, 1.0, chosen, {UNSCALED: paired_bootstrap([1.0], [2.0])})], RopePolicy(), {}
    )
    assert "not known how sure" in alone
    assert tomllib.loads(alone)["ladder"] == [{"factor": 2.0, "scheme": "yarn"}]
