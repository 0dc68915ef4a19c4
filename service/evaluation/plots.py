"""Figures as PNG files. The one place that knows matplotlib, an optional package."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from service.evaluation.figures import HeatMap, Lines

DOTS_PER_INCH = 120
MISSING = "no plots: matplotlib is not installed; pip install 'ropewalk[eval]' brings it"


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_all(figures: Iterable[Lines | HeatMap], folder: Path) -> None:
    """One PNG file for each figure, under its name."""
    from matplotlib.figure import Figure  # takes a second, and need not be there

    for shown in figures:
        figure = Figure(figsize=(7.0, 4.2), dpi=DOTS_PER_INCH, layout="constrained")
        axes = figure.subplots()
        axes.set(title=shown.title, xlabel=shown.across, ylabel=shown.up)
        if isinstance(shown, Lines):
            _draw_lines(axes, shown)
        else:
            _draw_map(figure, axes, shown)
        figure.savefig(folder / f"{shown.name}.png")


def _draw_lines(axes: Any, shown: Lines) -> None:
    for name, points in shown.curves.items():
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 12 else "", label=name)
    if shown.marked is not None:
        axes.axvline(shown.marked, color="grey", linestyle=":", label="native length")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_map(figure: Any, axes: Any, shown: HeatMap) -> None:
    values = [[float("nan") if value is None else value for value in row] for row in shown.values]
    image = axes.imshow(values, vmin=0, vmax=1, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(shown.columns)), shown.columns)
    axes.set_yticks(range(len(shown.rows)), shown.rows)
    figure.colorbar(image, label="share found")
