"""A histogram of many values at a time shows what prometheus_client's own shows of the same values."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from service.histogram import BulkHistogram

BUCKETS = (0.01, 0.1, 2.5, 10.0)
VALUES = st.sampled_from(BUCKETS) | st.floats(0, 20)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


@given(steps=st.lists(st.lists(VALUES, max_size=4), max_size=4))
def test_it_shows_what_one_that_takes_a_value_at_a_time_shows(steps: list[list[float]]) -> None:
    own, reference = CollectorRegistry(), CollectorRegistry()
    bulk = BulkHistogram("waited_seconds", "How long.", BUCKETS, own)
    single = Histogram("waited_seconds", "How long.", buckets=BUCKETS, registry=reference)
    for values in steps:
        bulk.observe(values)
        for value in values:
            single.observe(value)
    assert samples(own) == samples(reference)


def test_it_can_be_asked_for_by_name() -> None:
    registry = CollectorRegistry()
    BulkHistogram("waited_seconds", "How long.", BUCKETS, registry).observe([1.0])
    [found] = registry.restricted_registry(["waited_seconds_count"]).collect()
    assert [(sample.name, sample.value) for sample in found.samples] == [("waited_seconds_count", 1)]
