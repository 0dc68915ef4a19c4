"""What was measured, as Markdown for people and JSON for programs. Computes nothing."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from service.evaluation.errors import EvaluationError
from service.evaluation.figures import Shown, Table
from service.evaluation.plots import can_plot, draw_all

REPORT, FIGURES = "report.md", "results.json"


def write_report(folder: Path, about: Mapping[str, Any], shown: Sequence[Shown]) -> None:
    """Write the report, the same figures as JSON, and, where matplotlib is there, the plots.

    Args:
        folder: which exists.
        about: what was asked and of what, name to value.
        shown: one for each measurement.

    Raises:
        EvaluationError: a file cannot be written.
    """
    figures = [figure for section in shown for figure in section.figures]
    told = {"about": dict(about), "sections": [asdict(section) for section in shown]}
    try:
        (folder / FIGURES).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        if can_plot():
            draw_all(figures, folder)
        (folder / REPORT).write_text(markdown(about, shown, plotted=can_plot()), encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"--out: {error}") from error


def markdown(about: Mapping[str, Any], shown: Sequence[Shown], *, plotted: bool) -> str:
    """The report.

    Args:
        about: as for `write_report`.
        shown: likewise.
        plotted: whether there is a PNG file for each figure.
    """
    lines = ["# Positional scaling, measured", "", *(f"- {name}: {value}" for name, value in about.items())]
    for section in shown:
        lines += ["", f"## {section.title}", *_section(section, plotted)]
    return "\n".join(lines) + "\n"


def _section(section: Shown, plotted: bool) -> Iterator[str]:
    for failure in section.failed:
        yield from ("", f"**Failed:** {failure}")
    for table in section.tables:
        yield from ("", f"**{table.title}**", "", *table_lines(table))
    if plotted:
        yield from (line for figure in section.figures for line in ("", f"![{figure.title}]({figure.name}.png)"))


def table_lines(table: Table) -> Iterator[str]:
    """A Markdown table and its note."""
    yield f"| {' | '.join(table.head)} |"
    yield "|" + "---|" * len(table.head)
    yield from (f"| {' | '.join(row)} |" for row in table.rows)
    if table.note:
        yield from ("", table.note)
