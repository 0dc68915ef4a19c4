"""Finished cells, one JSON object a line, so that a run that was broken off goes on where it was.

Knows keys and values as JSON. Does not know what they mean.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.evaluation.errors import EvaluationError

Key = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One cell to compute.

    Attributes:
        key: all that its values depend on, beside what is common to a run; as JSON.
        tokens: how many are computed for it, for the progress bar.
        compute: its values, as JSON.
    """

    key: Key
    tokens: int
    compute: Callable[[], dict[str, Any]]


class Ledger:
    """The cells of one file. A line that was cut short when its writer died is computed again."""

    def __init__(self, file: Path, common: Key) -> None:
        """
        Args:
            file: read, and appended to; made, with its folders, where it does not exist.
            common: what all values of this run depend on: cells under another are left alone and not used.

        Raises:
            EvaluationError: the file cannot be read or written.
        """
        self._file = file
        self._common = common
        self._cells: dict[str, dict[str, Any]] = {}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
            self._ends_whole = lines[-1] == b""
        except OSError as error:
            raise EvaluationError(f"{file}: {error}") from error
        for line in lines:
            cell = _cell(line)
            if cell is not None:
                self._cells[_name(cell["key"])] = cell

    def get(self, key: Key) -> dict[str, Any] | None:
        """The values of a cell, None where it has not been computed."""
        cell = self._cells.get(self._name(key))
        return None if cell is None else cell["values"]

    def __getitem__(self, key: Key) -> dict[str, Any]:
        values: dict[str, Any] = self._cells[self._name(key)]["values"]
        return values

    def seconds(self, key: Key) -> float:
        """How long a cell took to compute, whenever that was."""
        return float(self._cells[self._name(key)]["seconds"])

    def compute(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        """Compute a cell and append it, unless it is there."""
        if self.get(job.key) is not None:
            return
        began = clock()
        values = job.compute()
        cell = {"key": {**self._common, **job.key}, "values": values, "seconds": round(clock() - began, 3)}
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write("\n" * (not self._ends_whole) + json.dumps(cell) + "\n")
        except OSError as error:
            raise EvaluationError(f"{self._file}: {error}") from error
        self._ends_whole = True
        self._cells[self._name(job.key)] = cell

    def _name(self, key: Key) -> str:
        return _name({**self._common, **key})


def _name(key: Key) -> str:
    return json.dumps(key, sort_keys=True)


def _cell(line: bytes) -> dict[str, Any] | None:
    """The cell of a line, None where it is not whole."""
    try:
        cell = json.loads(line)
    except ValueError:
        return None
    return cell if isinstance(cell, dict) and {"key", "values", "seconds"} <= cell.keys() else None
