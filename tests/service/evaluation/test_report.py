"""Reports: Markdown, JSON and plots."""

import json
from pathlib import Path

import pytest

from service.evaluation import plots, report
from service.evaluation.figures import HeatMap, Lines, Shown, Table

LINES = Lines("curve", "A curve", "tokens", "nats", {"a": [(1, 2.0), (2, 3.0)], "b": [(1, 1.0)]}, 1.5)
HEAT = HeatMap("heat", "A map", "tokens", "depth", ["1", "2"], ["0%"], [[0.5, None]])
TABLE = Table("Nats a token", ["scheme", "8"], [["yarn", "1.234"]], "Over 3 documents.")
SHOWN = [Shown("First", [TABLE], [LINES]), Shown("Second", [], [HEAT], ["it is broken"])]


def test_the_report_has_every_table_figure_and_failure() -> None:
    text = report.markdown({"model": "tiny"}, SHOWN, plotted=True)
    for part in ("- model: tiny", "## First", "| yarn | 1.234 |", "Over 3 documents.", "**Failed:** it is broken"):
        assert part in text.splitlines()
    assert "![A curve](curve.png)" in text
    assert "![A map](heat.png)" in text
    assert ".png" not in report.markdown({}, SHOWN, plotted=False)


def test_without_matplotlib_there_are_no_plots_and_nothing_else_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "can_plot", lambda: False)
    report.write_report(tmp_path, {"model": "tiny"}, SHOWN)
    assert {file.name for file in tmp_path.iterdir()} == {"report.md", "results.json"}
    told = json.loads((tmp_path / "results.json").read_text())
    assert told["about"] == {"model": "tiny"}
    assert told["sections"][0]["tables"][0]["rows"] == [["yarn", "1.234"]]
    assert told["sections"][0]["figures"][0]["curves"]["a"] == [[1, 2.0], [2, 3.0]]


def test_each_figure_becomes_a_png(tmp_path: Path) -> None:
    if not plots.can_plot():
        pytest.skip("matplotlib is not installed (extra: eval)")
    plots.draw_all([LINES, HEAT], tmp_path)
    for name in ("curve.png", "heat.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / name).stat().st_size > 5000
