"""Tracing is set up by OpenTelemetry's variables alone, is not there unless asked for, and gives up in time."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from service.commands import serve
from service.errors import StartupError
from service.tracing.export import Export
from service.tracing.start import start
from service.tracing.telemetry import Telemetry
from tests.serving import DEADLINE, MODEL, fake_server, read_stream


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Collector(BaseHTTPRequestHandler):
    """Takes what an OTLP exporter posts: path and body."""

    posts: list[tuple[str, bytes]]
    headers_seen: list[str | None]

    def do_POST(self) -> None:
        self.posts.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.headers_seen.append(self.headers["x-tenant"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def collector() -> Iterator[tuple[str, type[Collector]]]:
    """A collector's address, and what it got."""
    handler = type("Handler", (Collector,), {"posts": [], "headers_seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


def texts(values: list[KeyValue]) -> dict[str, str]:
    return {value.key: value.value.string_value for value in values}


def serve_one_request(telemetry: Telemetry) -> None:
    prepared = fake_server()
    prepared.tracing, prepared.metrics.observer = telemetry, telemetry.journal
    with prepared as server:
        stream = read_stream(server.client, "/generate", {"prompt": "abc", "max_tokens": 3, "ignore_eos": True})
        assert stream.data[-1]["finish_reason"] == "length"


def test_a_collector_gets_spans_and_measurements_as_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (address, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=seven")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        serve_one_request(start(MODEL))
    assert {*got.headers_seen} == {"seven"}
    bodies = dict(got.posts)
    assert bodies.keys() == {"/v1/traces", "/v1/metrics"}
    (traces,) = ExportTraceServiceRequest.FromString(bodies["/v1/traces"]).resource_spans
    told = texts(list(traces.resource.attributes))
    assert (told["service.name"], told["deployment.environment.name"]) == ("ropewalk", "test")
    spans = [span for scope in traces.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == ["decode", "prefill", "queue", f"text_completion {MODEL}"]
    (measured,) = ExportMetricsServiceRequest.FromString(bodies["/v1/metrics"]).resource_metrics
    names = {metric.name for scope in measured.scope_metrics for metric in scope.metrics}
    assert names >= {"gen_ai.server.request.duration", "gen_ai.client.token.usage"}


def test_the_service_has_the_name_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (address, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{address}/else/where")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
        serve_one_request(start(MODEL))
    ((path, body),) = got.posts
    assert path == "/else/where"
    (traces,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert texts(list(traces.resource.attributes))["service.name"] == "chat"


def test_without_a_collector_requests_are_served_and_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # the SDK's threads outlive the test no longer
    monkeypatch.setattr("service.tracing.export.SECONDS_FOR_LAST_SPANS", 0.1)
    serve_one_request(start(MODEL))


def test_a_collector_that_hangs_does_not_keep_the_server_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setattr("service.tracing.export.SECONDS_FOR_LAST_SPANS", 0.01)
    export, let_go, gone = Export(), threading.Event(), threading.Event()

    def hang() -> None:
        let_go.wait(DEADLINE)
        gone.set()

    monkeypatch.setattr(export.tracers, "shutdown", hang)
    export.stop()
    assert not gone.is_set()
    let_go.set()
    assert gone.wait(DEADLINE)


def test_the_sdk_can_be_switched_off_by_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (address, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        serve_one_request(start(MODEL))
    assert got.posts == []


@pytest.mark.parametrize(
    ("variable", "value", "known"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp or console or none"),
        ("OTEL_METRICS_EXPORTER", "prometheus", "otlp or console or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "http/protobuf"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, known: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartupError, match=f"^{variable}: must be {known}, it is '{value}'$"):
        start(MODEL)


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_without_the_extra_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "service.tracing.export", raising=False)
    with pytest.raises(StartupError, match=r"pip install 'ropewalk\[otel\]'"):
        start(MODEL)


def test_the_setting_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "carrier-pigeon")
    with pytest.raises(StartupError, match="OTEL_TRACES_EXPORTER"):
        serve.serve({"otel": True})


def test_nothing_of_it_is_imported_unless_asked_for() -> None:
    """Of the API, that is not for us to say: FastAPI imports it where it is installed."""
    code = (
        "import sys, service.commands.serve, service.api.generating; "
        "parts = 'opentelemetry.sdk', 'opentelemetry.exporter', 'service.tracing.export', 'service.tracing.telemetry'; "
        "print([name for name in sys.modules if name.startswith(parts)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
