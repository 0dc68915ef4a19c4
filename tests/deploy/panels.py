"""What the dashboard's panels show: their queries, asked of Prometheus over a range, and names and numbers as Grafana
writes them. Draws nothing."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.deploy.files import ONLY_WITH_A_GPU, dashboard, without_variables
from tests.deploy.prometheus import Prometheus, Series

PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
BINARY_PREFIXES = ((2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"), (1.0, ""))
PARTS_OF_A_SECOND = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class Panel:
    """One panel and what it shows.

    Attributes:
        declared: the panel as Grafana reads it.
        curves: name to values, one for each of the times that were asked for; NaN where there is none.
    """

    declared: dict[str, Any]
    curves: dict[str, list[float]]

    @property
    def title(self) -> str:
        return str(self.declared["title"])

    @property
    def kind(self) -> str:
        """`row`, `stat`, `timeseries` or `heatmap`."""
        return str(self.declared["type"])

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Column, row, width and height in Grafana's grid of 24 columns."""
        at = self.declared["gridPos"]
        return at["x"], at["y"], at["w"], at["h"]

    @property
    def defaults(self) -> dict[str, Any]:
        """How values are shown: unit, bounds, thresholds, kind of lines."""
        found: dict[str, Any] = self.declared.get("fieldConfig", {}).get("defaults", {})
        return found

    @property
    def is_stacked(self) -> bool:
        return bool(self.defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal")

    @property
    def is_empty(self) -> bool:
        """Whether there is no number in it."""
        return all(math.isnan(value) for values in self.curves.values() for value in values)

    @property
    def unit(self) -> str:
        """Grafana's name of the unit of all curves but those that have their own."""
        return str(self.defaults.get("unit", "short"))

    @property
    def own_units(self) -> dict[str, str]:
        """Curves with a unit of their own, which Grafana draws against an axis on the right."""
        return {
            override["matcher"]["options"]: changed["value"]
            for override in self.declared.get("fieldConfig", {}).get("overrides", [])
            for changed in override["properties"]
            if changed["id"] == "unit"
        }


def read_dashboard(prometheus: Prometheus, times: Sequence[float], rate_interval: str) -> list[Panel]:
    """All panels, rows among them.

    Args:
        prometheus: is asked.
        times: seconds since 1970, at equal distances.
        rate_interval: that rates are taken over.
    """
    return [
        Panel(declared, dict(_curves(prometheus, declared, times, rate_interval))) for declared in dashboard()["panels"]
    ]


def _curves(
    prometheus: Prometheus, declared: dict[str, Any], times: Sequence[float], rate_interval: str
) -> Iterator[tuple[str, list[float]]]:
    for target in declared.get("targets", []):
        query = without_variables(target["expr"], rate_interval)
        found = prometheus.series(query, times[0], times[-1], times[1] - times[0])
        if target.get("format") == "heatmap":
            yield from counts_by_bucket(found, times).items()
        else:
            yield from ((legend(target.get("legendFormat", ""), one.labels), on_grid(one, times)) for one in found)


def unexpectedly_empty(panels: Iterable[Panel], *, with_a_gpu: bool) -> set[str]:
    """Titles of panels that show nothing though they should."""
    return {
        panel.title
        for panel in panels
        if panel.kind != "row" and panel.is_empty and (with_a_gpu or panel.title not in ONLY_WITH_A_GPU)
    }


def legend(template: str, labels: dict[str, str]) -> str:
    """A series' name: the template with each {{label}} filled in."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda label: labels.get(label[1], ""), template)


def on_grid(series: Series, times: Sequence[float]) -> list[float]:
    """A series' values at given times, NaN where it has none: Prometheus leaves those out."""
    known = {round(time, 3): value for time, value in zip(series.times, series.values, strict=True)}
    return [known.get(round(time, 3), math.nan) for time in times]


def counts_by_bucket(series: Iterable[Series], times: Sequence[float]) -> dict[str, list[float]]:
    """Of a histogram's series, whose counts are of all values up to a bound (label `le`), the counts of each bucket
    alone, from the lowest bound to the highest."""
    below = [0.0] * len(times)
    counts = {}
    for one in sorted(series, key=lambda one: float(one.labels["le"])):
        up_to = on_grid(one, times)
        counts[one.labels["le"]] = [more - less for more, less in zip(up_to, below, strict=True)]
        below = up_to
    return counts


def with_unit(value: float, unit: str) -> str:
    """A number as Grafana writes it, to three digits.

    Args:
        value: the number.
        unit: Grafana's name of its unit: `short` (none), `s`, `percentunit`, `reqps`, `bytes`.

    Raises:
        ValueError: no panel has had that unit so far.
    """
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        size, name = next((p for p in PARTS_OF_A_SECOND if abs(value) >= p[0]), PARTS_OF_A_SECOND[-1])
        return f"{value / size:.3g} {name}" if value else "0 s"
    size, prefix = next((p for p in (BINARY_PREFIXES if unit == "bytes" else PREFIXES) if abs(value) >= p[0]), (1, ""))
    match unit:
        case "short":
            return f"{value / size:.3g}{prefix}"
        case "reqps":
            return f"{value / size:.3g}{prefix} req/s"
        case "bytes":
            return f"{value / size:.4g} {prefix}B"
    raise ValueError(f"unit is {unit!r}; known are short, s, percentunit, reqps, bytes")
