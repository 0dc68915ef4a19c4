"""Retrieval through the engine: what is asked under which plan, and what tables and maps say."""

import re
from pathlib import Path

import pytest

from service.evaluation import finding
from service.evaluation.figures import HeatMap
from service.scaling.policy import PlanChoice
from tests.service.evaluation.tiny import TinyBench


def answering(tried: TinyBench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """Have the engine know every answer of up to 200 tokens, and none of longer ones."""
    asked: list[tuple[int, int, str]] = []

    def generate(prompt: list[int], choice: PlanChoice, max_tokens: int) -> str:
        asked.append((len(prompt), max_tokens, f"{choice.plan.scheme} {choice.plan.factor:g}"))
        [number] = set(re.findall(r"key is (\d{5})\.", bytes(prompt).decode()))
        return f" {number}." if len(prompt) <= 200 else " 1."

    monkeypatch.setattr(tried.bench.driver, "generate", generate)
    return asked


def test_each_scheme_length_depth_and_document_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = TinyBench(tmp_path / "cells", "yarn:2,policy", (200, 240), documents=2)
    asked = answering(tried, monkeypatch)
    ledger = tried.compute(finding.jobs(tried.bench, "passkey"))
    assert {(tokens + most, plan) for tokens, most, plan in asked} == {
        *((200, "yarn 2"), (240, "yarn 2"), (200, "yarn 4"), (240, "yarn 4"))
    }
    assert len(asked) == 2 * 2 * 5 * 2
    shown = finding.show(tried.bench, ledger, "passkey")
    [table] = shown.tables
    assert table.rows == [["yarn:2", "100%", "0%"], ["policy", "100%", "0%"]]
    assert [figure.name for figure in shown.figures] == ["passkey-yarn-2", "passkey-policy"]
    heat = shown.figures[0]
    assert isinstance(heat, HeatMap)
    assert heat.values == [[1.0, 0.0]] * 5
    assert heat.rows == ["0%", "25%", "50%", "75%", "100%"]


def test_a_real_engine_answers_within_the_length(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells", "default,policy", (200, 300), documents=1)
    ledger = tried.compute(jobs := finding.jobs(tried.bench, "needle"))
    assert len(jobs) == 3 * 5  # the policy ends at 256
    assert all(isinstance(ledger[job.key]["text"], str) for job in jobs)
    assert finding.show(tried.bench, ledger, "needle").tables[0].rows == [
        ["default", "0%", "0%"],
        ["policy", "0%", ""],
    ]
