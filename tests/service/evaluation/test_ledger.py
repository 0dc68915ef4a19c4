"""Cells that are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.evaluation.errors import EvaluationError
from service.evaluation.ledger import Job, Ledger
from service.evaluation.progress import compute_all


class Counted:
    """Jobs that say how often each was computed."""

    def __init__(self) -> None:
        self.computed: list[int] = []

    def job(self, number: int) -> Job:
        return Job({"measure": "test", "number": number}, 1, lambda: self._compute(number))

    def _compute(self, number: int) -> dict[str, Any]:
        self.computed.append(number)
        return {"square": number**2}


def test_a_second_start_computes_only_what_is_missing(tmp_path: Path) -> None:
    file, counted = tmp_path / "deep" / "cells.jsonl", Counted()
    compute_all([counted.job(number) for number in (1, 2, 2)], Ledger(file, {"model": "a"}))
    assert counted.computed == [1, 2]
    again = Ledger(file, {"model": "a"})
    assert again[{"number": 2, "measure": "test"}] == {"square": 4}
    compute_all([counted.job(number) for number in (3, 2, 1)], again)
    assert counted.computed == [1, 2, 3]
    assert len(file.read_text().splitlines()) == 3


def test_what_was_computed_for_something_else_is_not_used(tmp_path: Path) -> None:
    file, counted = tmp_path / "cells.jsonl", Counted()
    for model in ("a", "b", "a"):
        compute_all([counted.job(1)], Ledger(file, {"model": model}))
    assert counted.computed == [1, 1]


def test_a_line_that_was_cut_short_is_computed_again_and_spoils_no_other(tmp_path: Path) -> None:
    file, counted = tmp_path / "cells.jsonl", Counted()
    compute_all([counted.job(1), counted.job(2)], Ledger(file, {}))
    file.write_bytes(file.read_bytes()[:-9])
    compute_all([counted.job(2), counted.job(3)], Ledger(file, {}))
    assert counted.computed == [1, 2, 2, 3]
    compute_all([counted.job(number) for number in (1, 2, 3)], Ledger(file, {}))
    assert counted.computed == [1, 2, 2, 3]


def test_each_cell_is_kept_as_soon_as_it_is_done(tmp_path: Path) -> None:
    file, counted = tmp_path / "cells.jsonl", Counted()

    def fail() -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_all([counted.job(1), Job({"measure": "test"}, 1, fail)], Ledger(file, {}))
    assert Ledger(file, {}).get({"measure": "test", "number": 1}) == {"square": 1}


def test_a_cell_says_how_long_it_took(tmp_path: Path) -> None:
    file, times = tmp_path / "cells.jsonl", iter([5.0, 7.25])
    Ledger(file, {"a": 1}).compute(Counted().job(3), lambda: next(times))
    assert Ledger(file, {"a": 1}).seconds(Counted().job(3).key) == 2.25
    assert json.loads(file.read_text())["key"] == {"a": 1, "measure": "test", "number": 3}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="file"):
        Ledger(tmp_path / "file" / "cells.jsonl", {})
