"""Every metric that rules, dashboard, autoscaler, picker and docs speak of is one that a server has."""

import re
from collections.abc import Iterator

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from service.metrics import Metrics
from tests.deploy.files import DOCS, KUBERNETES, dashboard_queries, documents, rules

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# A query names a metric, a recorded one has a colon; labels and functions have neither prefix.
NAME = re.compile(r"\bropewalk[_:][a-z0-9_:]*[a-z0-9]\b")
LABELS_CHOSEN_BY_CODE = re.compile(r'(ropewalk_\w+)\{[^}]*?(code|finished_reason)(=~?|!=)"([^"]+)"')


@pytest.fixture(name="families")
def _families(monkeypatch: pytest.MonkeyPatch) -> list[Metric]:
    """What a server with one CUDA device exposes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    return list(Metrics(CollectorRegistry()).registry.collect())


@pytest.fixture(name="exposed")
def _exposed(families: list[Metric]) -> set[str]:
    """Names of all samples, also of those whose labels have no value yet."""
    return {family.name + suffix for family in families for suffix in SUFFIXES.get(family.type, ("",))}


def recorded() -> set[str]:
    return {rule["record"] for rule in rules("recording.yaml")}


def queries() -> Iterator[tuple[str, str]]:
    yield from ((rule["record"], rule["expr"]) for rule in rules("recording.yaml"))
    yield from ((rule["alert"], rule["expr"]) for rule in rules("alerts.yaml"))
    yield from dashboard_queries()
    (scaled,) = documents(KUBERNETES / "components" / "autoscale" / "scaledobject.yaml")
    yield from ((f"scale on {t['name']}", t["metadata"]["query"]) for t in scaled["spec"]["triggers"])


def names_with_places() -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for place, query in queries():
        for name in NAME.findall(query):
            places.setdefault(name, []).append(place)
    return places


@pytest.mark.parametrize("name", sorted(names_with_places()))
def test_a_name_in_a_query_exists(name: str, exposed: set[str]) -> None:
    assert name in exposed | recorded(), f"used by {names_with_places()[name]}"


def test_every_query_names_a_metric() -> None:
    assert [place for place, query in queries() if not NAME.search(query) and "up{" not in query] == []


@pytest.mark.parametrize("label", ["code", "finished_reason"])
def test_a_value_that_an_alert_waits_for_is_there_from_the_start(label: str, families: list[Metric]) -> None:
    """A counter that appears with its first event has no increase yet: the first fault would go unseen."""
    present = {
        (sample.name, sample.labels[label])
        for family in families
        for sample in family.samples
        if label in sample.labels
    }
    awaited = {
        (name, value)
        for _, query in queries()
        for name, key, operator, values in LABELS_CHOSEN_BY_CODE.findall(query)
        if key == label and operator != "!="
        for value in values.split("|")
    }
    assert awaited, "no query selects by this label: is the expression out of date?"
    assert awaited - present == set()


def test_the_picker_reads_gauges_that_exist(families: list[Metric]) -> None:
    (config,) = documents(KUBERNETES / "components" / "gateway" / "picker-config.yaml")
    (extractor,) = [plugin for plugin in config["plugins"] if plugin["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    read = {value for key, value in engine.items() if key.endswith("Spec")}
    assert len(read) == 5
    assert read - {family.name for family in families if family.type == "gauge"} == set()
    assert engine["name"] == extractor["parameters"]["defaultEngine"]


def test_names_in_the_docs_exist(exposed: set[str]) -> None:
    families = {name.removesuffix("_bucket") for name in exposed}
    named = {
        name
        for path in DOCS.glob("*.md")
        for name in re.findall(r"`(ropewalk[_:][a-z0-9_:]+)`", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    assert named - exposed - families - recorded() == set()


def test_every_metric_is_in_the_docs(exposed: set[str]) -> None:
    text = (DOCS / "monitor.md").read_text(encoding="utf-8")
    own = {name for name in exposed if name.startswith("ropewalk_") and not name.endswith(("_sum", "_count"))}
    assert {name for name in own if f"`{name.removesuffix('_bucket')}`" not in text} == set()


def test_every_bound_of_an_objective_is_a_bucket(families: list[Metric]) -> None:
    buckets = {
        (sample.name, sample.labels["le"]) for family in families for sample in family.samples if "le" in sample.labels
    }
    bounds = {bound for _, query in queries() for bound in re.findall(r'(ropewalk_\w+_bucket)\{le="([^"]+)"\}', query)}
    assert len(bounds) == 2
    assert bounds - buckets == set()
    # Prometheus 3 writes 10.0 where Prometheus 2 writes 10.
    assert all(float(bound) != int(float(bound)) for _, bound in bounds)
