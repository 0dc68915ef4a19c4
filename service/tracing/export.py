"""Where spans and measurements go: what OpenTelemetry's own variables say, and nothing else.

The SDK and its exporters read most of them (OTEL_EXPORTER_OTLP_…, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_TRACES_SAMPLER, OTEL_BSP_…, OTEL_METRIC_EXPORT_INTERVAL, OTEL_PROPAGATORS, OTEL_SDK_DISABLED); which exporter is
left to whoever assembles them, and chosen here.
"""

import os
import threading
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

from service.errors import StartupError

SPAN_EXPORTERS: Mapping[str, Callable[[], SpanExporter] | None] = {
    "otlp": OTLPSpanExporter,
    "console": ConsoleSpanExporter,
    "none": None,
}
METRIC_EXPORTERS: Mapping[str, Callable[[], MetricExporter] | None] = {
    "otlp": OTLPMetricExporter,
    "console": ConsoleMetricExporter,
    "none": None,
}
PROTOCOL = "http/protobuf"
SECONDS_FOR_LAST_SPANS = 5


class Export:
    """The SDK's providers, which send in the background: an exporter that fails is logged, and no request hears of it.

    Attributes:
        tracers: where spans go.
        meters: where measurements go.
    """

    def __init__(self) -> None:
        """
        Raises:
            StartupError: a variable names an exporter or a protocol that is not there.
        """
        for signal in ("", "TRACES_", "METRICS_"):
            _chosen(f"OTEL_EXPORTER_OTLP_{signal}PROTOCOL", PROTOCOL, [PROTOCOL])
        span_exporter = SPAN_EXPORTERS[_chosen("OTEL_TRACES_EXPORTER", "otlp", SPAN_EXPORTERS)]
        metric_exporter = METRIC_EXPORTERS[_chosen("OTEL_METRICS_EXPORTER", "otlp", METRIC_EXPORTERS)]
        own = Resource.create({"service.name": "ropewalk", "service.version": version("ropewalk")})
        resource = own.merge(OTELResourceDetector().detect())
        self.tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        if span_exporter is not None:
            self.tracers.add_span_processor(BatchSpanProcessor(span_exporter()))
        readers = [] if metric_exporter is None else [PeriodicExportingMetricReader(metric_exporter())]
        self.meters = MeterProvider(readers, resource, shutdown_on_exit=False)

    def stop(self) -> None:
        """Send what is left, for as long as the end of the process can wait."""
        sending = threading.Thread(target=self._shut_down, name="last-spans", daemon=True)
        sending.start()
        sending.join(SECONDS_FOR_LAST_SPANS)

    def _shut_down(self) -> None:
        self.tracers.shutdown()
        self.meters.shutdown()


def _chosen(variable: str, default: str, known: Collection[str]) -> str:
    """The value of a variable; empty counts as not set, as OpenTelemetry has it."""
    value = os.environ.get(variable, "").strip() or default
    if value not in known:
        raise StartupError(f"{variable}: must be {' or '.join(known)}, it is {value!r}")
    return value
