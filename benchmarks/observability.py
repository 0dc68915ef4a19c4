"""What metrics and tracing add to a step, and what tracing adds to a request.

The step is that of `benchmarks/loop.py`: all that the engine's thread does beside the model. Three engines take turns,
step by step, so that whatever else the machine does meets all alike: one whose metrics do nothing, one with the metrics
that every server has, one that is traced too. A request's spans are made on the event loop, away from the engine's
thread, and are measured by themselves: from arrival to the last span's end, with the SDK's own batches and an exporter
that drops them. Run it on an idle machine:

    python benchmarks/observability.py [--rows 1,16,64] [--steps 300] [--requests 2000] [--out benchmarks/observability]
"""

import argparse
import json
import statistics
import time
from collections import abc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from loop import decoding_engine
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry
from starlette.types import Scope

from service.core import SamplingParams, Sequence
from service.metrics import Metrics
from service.tracing.instruments import Instruments
from service.tracing.journal import Journal
from service.tracing.request import RequestSpan

WARM_UPS = 20  # steps
SCOPE: Scope = {
    "type": "http",
    "method": "POST",
    "path": "/generate",
    "headers": [(b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")],
}


class Nothing:
    """In place of metrics: whatever is asked of it or called on it does nothing."""

    def __getattr__(self, name: str) -> Self:
        return self

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to do."""


class NoText:
    """A detokeniser of which nothing comes."""

    def push(self, _: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Dropped(SpanExporter):
    """Takes spans and does nothing with them."""

    def export(self, _: abc.Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def measure_steps(rows: int, steps: int) -> dict[str, float]:
    """Median microseconds of a step, of the thread's own work, for each kind of engine."""
    kinds: dict[str, Callable[[], Any]] = {
        "off": Nothing,
        "metrics": lambda: Metrics(CollectorRegistry()),
        "metrics_and_tracing": lambda: Metrics(CollectorRegistry(), Journal()),
    }
    sampling = SamplingParams(max_tokens=WARM_UPS + steps + 2, temperature=0.0)
    engines = {kind: decoding_engine(rows, sampling, lambda _: NoText(), metrics()) for kind, metrics in kinds.items()}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = list(kinds)
    for _ in range(WARM_UPS + steps):
        order.append(order.pop(0))
        for kind in order:
            start = time.thread_time()
            engines[kind].step()
            times[kind].append(time.thread_time() - start)
    return {kind: 1e6 * statistics.median(taken[WARM_UPS:]) for kind, taken in times.items()}


class Handle:
    """A request that ends when it is told to."""

    timeout = None

    def __init__(self, sequence: Sequence) -> None:
        self.request_id, self.sequences = sequence.request_id, [sequence]
        self._ended: list[Callable[[], None]] = []

    def when_ended(self, call: Callable[[], None]) -> None:
        self._ended.append(call)

    def end(self) -> None:
        for call in self._ended:
            call()


def measure_spans(requests: int) -> float:
    """Median microseconds that one request's spans and measurements take, the engine's part left out."""
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(Dropped()))
    meters = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    tracer, instruments, journal = (
        tracers.get_tracer("benchmark"),
        Instruments(meters.get_meter("benchmark")),
        Journal(),
    )
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    engine = decoding_engine(1, greedy, lambda _: NoText(), Metrics(CollectorRegistry(), journal))
    (sequence,) = engine.scheduler.running
    while engine.step():
        pass
    times = []
    for _ in range(requests):
        handle: Any = Handle(sequence)
        start = time.thread_time()
        span = RequestSpan(SCOPE, "model", tracer, instruments, journal)
        span.follow(handle, choices_per_prompt=1)
        handle.end()
        span.answered(200, None)
        times.append(time.thread_time() - start)
    tracers.shutdown()
    meters.shutdown()
    return 1e6 * statistics.median(times)


def as_markdown(steps: Mapping[int, Mapping[str, float]], span: float) -> str:
    """A table of what was measured."""
    lines = [
        "# What metrics and tracing cost",
        "",
        "By `python benchmarks/observability.py`: the engine's loop without a model, microseconds a step, medians of",
        "three engines that take turns; in brackets the ratio to the engine whose metrics do nothing.",
        "",
        "| requests in the step | off | metrics | metrics and tracing |",
        "|---|---|---|---|",
    ]
    for rows, times in steps.items():
        cells = [f"{times[kind]:.0f} ({times[kind] / times['off']:.3f})" for kind in times if kind != "off"]
        lines.append(f"| {rows} | {times['off']:.0f} | {' | '.join(cells)} |")
    lines += [
        "",
        f"A traced request takes {span:.0f} microseconds of the event loop for its four spans and its numbers.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write what came of it."""
    parser = argparse.ArgumentParser(description="What metrics and tracing cost.")
    parser.add_argument("--rows", default="1,16,64", help="requests in a step, several after each other")
    parser.add_argument("--steps", type=int, default=300, help="steps of each engine that are measured")
    parser.add_argument("--requests", type=int, default=2000, help="requests whose spans are measured")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "observability")
    options = parser.parse_args()
    steps = {rows: measure_steps(rows, options.steps) for rows in map(int, options.rows.split(","))}
    span = measure_spans(options.requests)
    result = {"step_us": steps, "request_us": span}
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(as_markdown(steps, span))
    print(as_markdown(steps, span))


if __name__ == "__main__":
    main()
