"""Likelihood cells: which runs are made, and what tables say of them."""

from pathlib import Path

import numpy as np
import pytest

from service.evaluation import likelihood, sliding
from service.evaluation.schemes import SchemeAsked
from tests.service.evaluation.tiny import TinyBench


def test_what_rotates_alike_is_run_once_at_its_longest(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells", schemes="default,yarn:2,yarn,policy", lengths=(32, 64, 96, 128), documents=2)
    runs = likelihood.runs(likelihood.choices(tried.bench)).values()
    assert sorted((run.choice.plan.scheme, run.choice.plan.factor, run.length) for run in runs) == [
        ("default", 1.0, 128),  # also yarn and the policy up to 64
        ("yarn", 1.5, 96),  # yarn and the policy
        ("yarn", 2.0, 128),  # yarn:2 at every length, yarn and the policy at 128
    ]
    assert len(likelihood.jobs(tried.bench)) == 6


def test_a_shorter_length_is_the_beginning_of_a_longer_one(tmp_path: Path) -> None:
    long = TinyBench(tmp_path / "long", schemes="yarn:2", lengths=(48, 120))
    found = likelihood.scores(
        long.bench, long.compute(likelihood.jobs(long.bench)), likelihood.choices(long.bench), 120
    )
    short = TinyBench(tmp_path / "short", schemes="yarn:2", lengths=(48,))
    for document, ours in zip(long.bench.cut(120), found[SchemeAsked("yarn", 2.0), 48], strict=True):
        choice = likelihood.choices(short.bench)[SchemeAsked("yarn", 2.0), 48]
        alone = short.bench.driver.score(document[:47], choice).nll
        assert len(alone) == len(ours) == 46
        assert np.abs(ours - alone).max() < 1e-4


def test_the_tables_hold_the_means_of_what_was_scored(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells")
    ledger = tried.compute(likelihood.jobs(tried.bench))
    shown = likelihood.show(tried.bench, ledger)
    by_length, against_best, *by_position = shown.tables
    found = likelihood.scores(tried.bench, ledger, likelihood.choices(tried.bench), 96)
    assert list(by_length.head) == ["scheme", "32", "64", "96"]
    for scheme, row in zip(tried.bench.schemes, by_length.rows, strict=True):
        means = [np.mean([nll.mean() for nll in found[scheme, length]]) for length in (32, 64, 96)]
        assert list(row) == [str(scheme), *(f"{mean:.3f}" for mean in means)]
    assert by_length.rows[0][1:3] == by_length.rows[3][1:3]  # policy and default
    assert by_length.rows[0][3] != by_length.rows[3][3]
    assert len(by_position) == 3
    last = by_position[-1]
    assert list(last.head) == ["scheme", "0 to 32", "32 to 64", "64 to 96"]
    assert last.rows[1][3] == f"{np.mean([nll[64:].mean() for nll in found[SchemeAsked('linear', 2.0), 96]]):.3f}"
    best = min(float(row[3]) for row in by_length.rows[:3])
    assert against_best.rows[2][1] == by_length.rows[3][3]
    assert float(against_best.rows[2][3]) == best
    assert float(against_best.rows[2][4].split()[0]) == pytest.approx(float(against_best.rows[2][1]) - best, abs=2e-3)
    curves = {figure.name: figure for figure in shown.figures}
    assert curves.keys() == {"nll-by-length", "nll-by-position"}


def test_a_length_that_the_policy_does_not_serve_is_left_empty(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells", schemes="default,policy", lengths=(64, 300), documents=1)
    shown = likelihood.show(tried.bench, tried.compute(likelihood.jobs(tried.bench)))
    assert shown.tables[0].rows[1][2] == ""
    assert shown.tables[0].rows[0][2] != ""


def test_windows_slide_over_neighbouring_tokens(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells", schemes="yarn:2", lengths=(40,), documents=1)
    ledger = tried.compute(jobs := sliding.jobs(tried.bench))
    [job], [document] = jobs, tried.bench.cut(40 + 3 * 20)
    choice = likelihood.choices(tried.bench)[SchemeAsked("yarn", 2.0), 40]
    expected = []
    for end in (39, 59, 79, 99):  # 20 new tokens each, the window's last one being that to generate
        window = document[end - 39 : end]
        assert len(window) == 39
        expected.append(np.mean(tried.bench.driver.score(window, choice).nll[-20:]))
    assert ledger[job.key]["nll"] == pytest.approx(expected, abs=1e-4)
    [table] = sliding.show(tried.bench, ledger).tables
    assert table.rows == [["yarn:2", f"{np.exp(np.mean(expected)):.2f}"]]
