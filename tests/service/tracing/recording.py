"""A server whose spans and measurements are kept in memory by the SDK's own exporters."""

from collections import Counter
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, Metric
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from service.tracing.telemetry import Telemetry
from tests.serving import HttpServer, wait_until


class Recording:
    """What a server sends, once it is attached to one that has not started."""

    def __init__(self, model: str, *others: SpanProcessor) -> None:
        self._exporter, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider(shutdown_on_exit=False)
        for processor in (SimpleSpanProcessor(self._exporter), *others):
            tracers.add_span_processor(processor)
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.stops = Counter[str]()
        self.telemetry = Telemetry(model, tracers, meters, lambda: self.stops.update(["stop"]))

    def attach(self, server: HttpServer) -> None:
        """Have a server that has not started tell it everything."""
        server.tracing, server.metrics.observer = self.telemetry, self.telemetry.journal

    @property
    def requests(self) -> list[ReadableSpan]:
        """The spans of requests, in the order of their ends."""
        return [span for span in self._exporter.get_finished_spans() if span.kind == SpanKind.SERVER]

    def request(self) -> ReadableSpan:
        """The span of the one request that was made; it may end after its answer."""
        wait_until(lambda: bool(self.requests), "a request's span has ended")
        (span,) = self.requests
        return span

    def stages(self, choice: int = 0) -> list[ReadableSpan]:
        """The spans of a choice's stages, as they began."""
        request = self.request()
        assert request.context is not None
        found = [span for span in self._exporter.get_finished_spans() if span.kind == SpanKind.INTERNAL]
        assert all(span.parent is not None and span.parent.span_id == request.context.span_id for span in found)
        own = [span for span in found if attributes(span)["ropewalk.choice"] == choice]
        return sorted(own, key=lambda span: span.start_time or 0)

    def metrics(self) -> dict[str, Metric]:
        """All metrics that have a value, by name."""
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def points(self, name: str) -> list[HistogramDataPoint]:
        """A histogram's points, one for each set of attributes."""
        metric = self.metrics().get(name)
        points = [] if metric is None else list(metric.data.data_points)
        assert all(isinstance(point, HistogramDataPoint) for point in points)
        return [point for point in points if isinstance(point, HistogramDataPoint)]

    def everything(self) -> str:
        """All that is sent, as text."""
        spans = "".join(span.to_json() for span in self._exporter.get_finished_spans())
        return spans + "".join(metric.to_json() for metric in self.metrics().values())


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9
