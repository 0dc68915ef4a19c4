"""Metrics of several replicas as one text."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.replicas.scrape import merge


def text_of(requests: int) -> str:
    registry = CollectorRegistry()
    Counter("requests", "Requests.", ["code"], registry=registry).labels('a "quoted" \\ code').inc(requests)
    Gauge("ready", "Whether it is.", registry=registry).set(1)
    Histogram("seconds", "Time.", buckets=(1.0, 2.0), registry=registry).observe(1.5)
    return generate_latest(registry).decode()


def test_every_sample_says_whose_it_is() -> None:
    text = merge({"one": text_of(3), "two": text_of(4)}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items()} | {
        "requests": "counter",
        "ready": "gauge",
        "seconds": "histogram",
    } == {name: family.type for name, family in families.items()}
    found = {
        (sample.name, sample.labels["replica"], sample.labels.get("code"), sample.labels.get("le")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert found["requests_total", "one", 'a "quoted" \\ code', None] == 3
    assert found["requests_total", "two", 'a "quoted" \\ code', None] == 4
    assert found["ready", "two", None, None] == 1
    assert found["seconds_bucket", "one", None, "2.0"] == 1
    assert found["seconds_bucket", "one", None, "1.0"] == 0
    assert found["seconds_count", "two", None, None] == 1


def test_a_family_is_described_once() -> None:
    text = merge({"one": text_of(3), "two": text_of(4)}).decode()
    assert text.count("# TYPE requests_total counter") == 1
    assert text.count("# HELP ready Whether it is.") == 1
