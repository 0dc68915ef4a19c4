"""`ropewalk eval` from its command line to its report, on a tiny model in a folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.__main__ import main
from service.evaluation import options
from service.evaluation.driver import Driver, Scored
from service.evaluation.measures import MEASURES
from service.evaluation.unrotated import UnrotatedModel
from service.scaling.policy import PlanChoice, Policy
from tests.service.evaluation.tiny import save_tiny, text_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Any:
    """Runs `ropewalk eval` with options."""
    text = tmp_path / "text.txt"
    text.write_text(text_of(2500))
    shared = ("--text", str(text), "--dtype", "float32", "--documents", "2", "--out", str(tmp_path / "out"))

    def start(*given: str) -> None:
        main(["eval", str(model), *shared, "--kv-cache-memory", "32MiB", *given])

    return start


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each prompt that the engine scores."""
    seen: list[int] = []
    score = Driver.score

    def counting(self: Driver, prompt: list[int], choice: PlanChoice) -> Scored:
        seen.append(len(prompt))
        return score(self, prompt, choice)

    monkeypatch.setattr(Driver, "score", counting)
    return seen


def test_every_measurement_ends_in_the_report_with_real_numbers(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        *("--native-length", "320", "--lengths", "320,480,640", "--schemes", "default,yarn:4,policy"),
        *("--measure", ",".join(options.MEASURE_NAMES)),
    )
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'report.md'}\n"
    report = (tmp_path / "out" / "report.md").read_text()
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [section["title"] for section in told["sections"]] == [
        *("Short-text guard", "Negative log-likelihood", "Sliding-window perplexity", "The decode path"),
        *(f"Retrieval: {task}" for task in ("passkey", "needle", "needles", "key-value")),
        "Attention entropy",
    ]
    assert "nan" not in report
    assert "- native length: 320\n" in report
    assert "- text: text.txt\n" in report
    assert "2 of 2" in report
    cells = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    found = [cell["values"]["nll"] for cell in cells if cell["key"]["measure"] == "nll"]
    assert len(found) == 4 * 2  # unscaled, yarn 4, and the policy's factors of 1.5 and 2
    assert all(0 < value < 50 for nll in found for value in nll)


def test_a_second_start_computes_nothing_and_another_length_only_itself(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted(monkeypatch)
    asked = ("--schemes", "default,yarn:2", "--measure", "nll")
    run("--lengths", "64,96", *asked)
    assert seen == [95, 95, 95, 95]
    first = json.loads((tmp_path / "out" / "results.json").read_text())["sections"]
    seen.clear()
    run("--lengths", "64,96", *asked)
    assert seen == []
    assert json.loads((tmp_path / "out" / "results.json").read_text())["sections"] == first
    run("--lengths", "96", *asked[:1], "default,yarn:2,yarn:4", *asked[2:])
    assert seen == [95, 95]
    seen.clear()
    run("--lengths", "64,96", "--max-batch-tokens", "64", *asked)
    assert len(seen) == 4


def test_a_broken_policy_fails_the_evaluation(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose = Policy.choose
    monkeypatch.setattr(Policy, "choose", lambda self, *_: choose(self, 100, 1))
    with pytest.raises(SystemExit) as ended:
        run("--lengths", "32", "--schemes", "default", "--measure", "guard")
    assert ended.value.code == 1
    assert "failed: the policy changes short texts: 2 of 2 documents of 32 tokens" in capsys.readouterr().err


def test_the_reference_is_loaded_only_where_it_is_needed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    begin = UnrotatedModel.__init__

    def counting(self: UnrotatedModel, *given: Any) -> None:
        made.append(1)
        begin(self, *given)

    monkeypatch.setattr(UnrotatedModel, "__init__", counting)
    run("--lengths", "64", "--schemes", "default", "--measure", "nll")
    assert made == []
    run("--lengths", "64,80", "--schemes", "default", "--measure", "entropy,decode")
    assert made == [1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--schemes", "yarm"), "--schemes: yarm is not for this model"),
        (("--measure", "nil"), "'nil' is none of guard, nll"),
        (("--lengths", "4"), "it must be at least 8, it is 4"),
        (("--lengths", "3000"), "no text has the 3000 tokens that a document needs"),
        (("--text", "/nowhere.txt"), "/nowhere.txt"),
        (("--measure", "decode", "--max-model-len", "64"), "nothing is crossed"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    run: Any, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*given)
    assert ended.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ropewalk: error")]
    assert message in line


def test_the_command_line_names_all_measurements() -> None:
    assert list(MEASURES) == list(options.MEASURE_NAMES)
