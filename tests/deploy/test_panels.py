"""What a panel shows, from what Prometheus answers."""

import math

import pytest

from tests.deploy.files import dashboard
from tests.deploy.panels import Panel, counts_by_bucket, legend, on_grid, unexpectedly_empty, with_unit
from tests.deploy.prometheus import Series

TIMES = [10.0, 12.0, 14.0]


def panel(title: str, *values: float, kind: str = "timeseries") -> Panel:
    return Panel({"title": title, "type": kind}, {"": list(values)} if values else {})


def test_a_legend_has_its_labels_filled_in() -> None:
    labels = {"scheme": "yarn", "mode": "static", "factor": "2.5"}
    assert legend("{{scheme}} {{mode}} by {{ factor }}", labels) == "yarn static by 2.5"
    assert legend("p95", labels) == "p95"


def test_times_that_prometheus_leaves_out_are_gaps() -> None:
    first, gap, last = on_grid(Series({}, [10.0, 14.0001], [1.0, 3.0]), TIMES)
    assert (first, last) == (1.0, 3.0)
    assert math.isnan(gap)


def test_a_bucket_has_what_the_bound_below_has_not() -> None:
    series = [
        Series({"le": "+Inf"}, TIMES, [6.0, 6.0, 6.0]),
        Series({"le": "16"}, TIMES, [5.0, 4.0, 3.0]),
        Series({"le": "2"}, TIMES, [1.0, 2.0, 3.0]),
    ]
    counts = counts_by_bucket(series, TIMES)
    assert list(counts.items()) == [("2", [1, 2, 3]), ("16", [4, 2, 0]), ("+Inf", [1, 2, 3])]


def test_a_panel_without_a_number_is_empty_and_that_is_told() -> None:
    panels = [
        panel("A", 0.0, math.nan),
        panel("B", math.nan),
        panel("C"),
        panel("Row", kind="row"),
        panel("Device memory"),
    ]
    assert unexpectedly_empty(panels, with_a_gpu=False) == {"B", "C"}
    assert unexpectedly_empty(panels, with_a_gpu=True) == {"B", "C", "Device memory"}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "percentunit", "25%"),
        (1.5, "s", "1.5 s"),
        (0.0125, "s", "12.5 ms"),
        (25e-6, "s", "25 µs"),
        (0.0, "s", "0 s"),
        (1234.0, "short", "1.23k"),
        (0.5, "short", "0.5"),
        (0.0, "short", "0"),
        (2.0, "reqps", "2 req/s"),
        (96 * 2.0**20, "bytes", "96 MiB"),
        (1.5 * 2.0**30, "bytes", "1.5 GiB"),
    ],
)
def test_a_number_has_its_unit(value: float, unit: str, text: str) -> None:
    assert with_unit(value, unit) == text


def test_every_unit_of_the_dashboard_is_known() -> None:
    panels = [Panel(declared, {}) for declared in dashboard()["panels"]]
    for unit in {p.unit for p in panels} | {unit for p in panels for unit in p.own_units.values()}:
        assert with_unit(1.0, unit)
    with pytest.raises(ValueError, match="furlong"):
        with_unit(1.0, "furlong")


def test_a_share_has_no_seconds() -> None:
    shares = {
        (panel.title, target["legendFormat"])
        for panel in (Panel(declared, {}) for declared in dashboard()["panels"])
        for target in panel.declared.get("targets", [])
        if target.get("legendFormat", "").startswith("share")
        if panel.own_units.get(target["legendFormat"]) != "percentunit"
    }
    assert shares == set()
