"""The dashboard as one picture, its panels where Grafana has them. The one place here that knows matplotlib (extra
`eval`)."""

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image

from tests.deploy.panels import Panel, with_unit

INCHES = (0.56, 0.27)
"""Width and height of a square of Grafana's grid."""
COLUMNS = 24
MARGIN = 0.1  # inches around a panel
HEAD, FOOT = 0.34, 0.62  # inches that a panel's title and its times and legend take
LEFT, RIGHT, RIGHT_WITH_VALUES = 0.62, 0.14, 0.56  # inches beside the curves
LEGEND_COLUMNS = 3
TICKS = 4
TONES = 256
DOTS_PER_INCH = 110
BACKGROUND, PAPER, EDGE, GRID, INK, PALE = "#f4f5f5", "#ffffff", "#dcdee2", "#ebecee", "#24292e", "#6e7780"
COLOURS = ("#4c8c4a", "#d9a520", "#3b8eb8", "#d9762c", "#b8434e", "#7a5ea8", "#8f6b4f", "#5aa6a0", "#9aa13a", "#8a8f96")
THRESHOLDS = {"green": "#4c8c4a", "yellow": "#d9a520", "red": "#b8434e"}


def draw_dashboard(panels: Sequence[Panel], times: Sequence[float], note: str, file: Path) -> None:
    """Write a PNG file.

    Args:
        panels: where and what.
        times: seconds since 1970, of the panels' values.
        note: a line below all panels.
        file: to write.
    """
    rows = max(y + h for _, y, _, h in (panel.place for panel in panels)) + 1
    size = COLUMNS * INCHES[0], rows * INCHES[1]
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, facecolor=BACKGROUND)
    seconds = [time - times[0] for time in times]
    for panel in panels:
        _draw(figure, panel, seconds, rows)
    figure.text(MARGIN / size[0], 0.4 * INCHES[1] / size[1], note, size=8, color=PALE, va="center")
    drawn = BytesIO()
    figure.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(TONES).save(file, optimize=True)  # a quarter of the bytes


def _draw(figure: Figure, panel: Panel, seconds: Sequence[float], rows: int) -> None:
    x, y, w, h = panel.place
    left, top = x * INCHES[0], (rows - y) * INCHES[1]
    width, height = w * INCHES[0], h * INCHES[1]

    def axes_at(*inches: float) -> Axes:
        """Axes from left, bottom, width and height."""
        box = [inch / figure.get_size_inches()[place % 2] for place, inch in enumerate(inches)]
        return figure.add_axes((box[0], box[1], box[2], box[3]))

    if panel.kind == "row":
        where = (left + MARGIN) / figure.get_size_inches()[0], (top - height / 2) / figure.get_size_inches()[1]
        figure.text(*where, panel.title, size=11, weight="bold", color=INK, va="center")
        return
    frame = axes_at(left + MARGIN / 2, top - height + MARGIN / 2, width - MARGIN, height - MARGIN)
    frame.set(facecolor=PAPER, xticks=[], yticks=[])
    frame.spines[:].set_color(EDGE)
    frame.annotate(panel.title, (0, 1), (8, -7), "axes fraction", "offset points", size=9, color=INK, va="top")
    if panel.is_empty:
        frame.text(0.5, 0.45, "No data", size=9, color=PALE, ha="center", transform=frame.transAxes)
    elif panel.kind == "stat":
        _draw_number(frame, panel, seconds)
    else:
        right = RIGHT_WITH_VALUES if panel.own_units else RIGHT
        axes = axes_at(left + LEFT, top - height + FOOT, width - LEFT - right, height - HEAD - FOOT)
        axes.set(facecolor=PAPER, xlim=(seconds[0], seconds[-1]))
        axes.tick_params(length=0, labelsize=7, labelcolor=PALE)
        axes.spines[:].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 3, 6]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{int(at) // 60}:{int(at) % 60:02d}"))
        if panel.kind == "heatmap":
            _draw_counts(axes, panel, seconds)
        else:
            _draw_curves(axes, panel, seconds)


def _draw_number(frame: Axes, panel: Panel, seconds: Sequence[float]) -> None:
    """The last number there is, its colour by the thresholds, over how it came to that."""
    (values,) = panel.curves.values()
    last = [value for value in values if not math.isnan(value)][-1]
    steps = panel.defaults.get("thresholds", {}).get("steps", [])
    passed = [step["color"] for step in steps if step["value"] is None or last >= step["value"]]
    colour = THRESHOLDS[passed[-1]] if passed else COLOURS[0]
    below = frame.inset_axes((0, 0, 1, 0.34))
    below.set(xlim=(seconds[0], seconds[-1]), ylim=(0, 1.1 * max(v for v in values if not math.isnan(v)) or 1))
    below.axis("off")
    below.fill_between(seconds, values, color=colour, alpha=0.15, linewidth=0)
    below.plot(seconds, values, color=colour, linewidth=0.8, alpha=0.6)
    frame.text(
        0.5,
        0.52,
        with_unit(last, panel.unit),
        size=19,
        color=colour,
        ha="center",
        va="center",
        transform=frame.transAxes,
    )


def _draw_curves(axes: Axes, panel: Panel, seconds: Sequence[float]) -> None:
    right = axes.twinx() if panel.own_units else axes
    if panel.is_stacked:
        areas = [[0 if math.isnan(value) else value for value in values] for values in panel.curves.values()]
        axes.stackplot(seconds, areas, labels=panel.curves, colors=COLOURS, alpha=0.55, linewidth=0)
    else:
        for number, (name, values) in enumerate(panel.curves.items()):
            where = right if name in panel.own_units else axes
            where.plot(seconds, values, color=COLOURS[number % len(COLOURS)], linewidth=1.1, label=name)
    for unit in panel.own_units.values():
        _write_values(right, unit)
        right.tick_params(length=0, labelsize=7, labelcolor=PALE)
        right.spines[:].set_visible(False)
    _write_values(axes, panel.unit, panel.defaults.get("max"))
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    handles, names = axes.get_legend_handles_labels()
    if right is not axes:
        more, their_names = right.get_legend_handles_labels()
        handles, names = handles + more, names + their_names
    axes.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(-0.1, -0.1),
        ncols=LEGEND_COLUMNS,
        frameon=False,
        fontsize=6,
        labelcolor=INK,
        handlelength=1,
        columnspacing=1,
        labelspacing=0.3,
        borderpad=0,
    )


def _write_values(axes: Axes, unit: str, top: float | None = None) -> None:
    """From 0 to `top`, or as far as the curves reach, with some values written beside."""
    reached = axes.dataLim.ymax
    axes.set_ylim(0, top or (1.05 * reached if reached > 0 else 1))
    highest = axes.get_ylim()[1]
    axes.yaxis.set_major_locator(
        MultipleLocator(2.0 ** math.ceil(math.log2(highest / TICKS))) if unit == "bytes" else MaxNLocator(TICKS)
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: with_unit(value, unit)))


def _draw_counts(axes: Axes, panel: Panel, seconds: Sequence[float]) -> None:
    bounds, counts = list(panel.curves), list(panel.curves.values())
    used = [place for place, values in enumerate(counts) if any(value > 0 for value in values)]
    first, last = max(0, used[0] - 1), used[-1] + 1
    counts = [[value if value > 0 else math.nan for value in values] for values in counts[first:last]]
    axes.pcolormesh(seconds, range(last - first), counts, cmap="Oranges", vmin=0, shading="nearest")
    axes.set_yticks(range(last - first), [f"≤ {float(bound):g}" for bound in bounds[first:last]])
