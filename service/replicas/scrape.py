"""The metrics of all replicas as one text, each sample with the label `replica`."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merge(texts: Mapping[str, str]) -> bytes:
    """One text of several.

    Args:
        texts: in Prometheus' text format, by the replica that each is of.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(texts))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples
                ]
        yield from families.values()
