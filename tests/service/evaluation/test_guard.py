"""The short-text guard, and that it barks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model_patches.plan import make_plan
from service.evaluation import guard
from service.evaluation.figures import Shown
from service.scaling.policy import PlanChoice, Policy
from tests.service.evaluation.tiny import TinyBench


def guarded(tried: TinyBench) -> Shown:
    return guard.show(tried.bench, tried.compute(guard.jobs(tried.bench)))


def test_the_default_policy_serves_short_texts_to_the_last_bit_as_if_it_were_not_there(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells", lengths=(32, 64, 96))
    shown = guarded(tried)
    assert shown.failed == []
    [table] = shown.tables
    assert list(table.head)[-2:] == ["linear:2, more", "yarn:2, more"]
    assert [[row[0], row[2]] for row in table.rows] == [["32", "3 of 3"], ["64", "3 of 3"]]
    assert all(row[3] != row[4] and not row[3].startswith("+0.000 ") for row in table.rows)


def test_native_and_policy_are_two_runs(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells", schemes="default", lengths=(32,), documents=1)
    assert [job.key["way"] for job in guard.jobs(tried.bench)] == ["native", "policy"]


def slightly_other(choice: PlanChoice) -> PlanChoice:
    """Its slowest pair off by a millionth."""
    *most, last = choice.plan.inv_freq
    return replace(choice, rungs=(replace(choice.plan, inv_freq=(*most, last * (1 + 1e-6))),))


def always_yarn(choice: PlanChoice) -> PlanChoice:
    plan = make_plan(TinyBench(Path("/dev/null")).policy.geometry, "yarn", 1.25, 80)
    return replace(choice, rungs=(plan,), mode="static")


@pytest.mark.parametrize("spoil", [slightly_other, always_yarn])
def test_a_policy_that_touches_short_texts_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any
) -> None:
    choose = Policy.choose
    monkeypatch.setattr(Policy, "choose", lambda self, tokens, most, wish=None: spoil(choose(self, tokens, most, wish)))
    shown = guarded(TinyBench(tmp_path / "cells", lengths=(32, 64), documents=2))
    assert len(shown.failed) == 2
    assert "2 of 2 documents of 64 tokens have other logits" in shown.failed[1]
    assert [row[2] for row in shown.tables[0].rows] == ["0 of 2", "0 of 2"]


def test_a_policy_that_spoils_one_document_of_two_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = TinyBench(tmp_path / "cells", schemes="default", lengths=(32,), documents=2)
    score, seen = type(tried.bench.driver).score, []

    def spoilt(self: Any, prompt: list[int], choice: PlanChoice) -> Any:
        seen.append(prompt)
        found = score(self, prompt, choice)
        return replace(found, digest="other") if len(seen) == 4 else found

    monkeypatch.setattr(type(tried.bench.driver), "score", spoilt)
    shown = guarded(tried)
    assert shown.tables[0].rows[0][2] == "1 of 2"
    assert len(shown.failed) == 1


def test_nothing_to_guard_is_no_pass(tmp_path: Path) -> None:
    shown = guarded(TinyBench(tmp_path / "cells", lengths=(96,), documents=1))
    assert shown.failed == ["no length is within the native length 64: nothing was guarded"]
