"""What Prometheus sees. Knows names, units and buckets; measures nothing itself.

Everything lives in the registry that is passed in, so that two servers in one process do not share a number.
"""

import resource
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import psutil
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from service.core import FinishEvent, FinishReason, Rerotation, Sequence
from service.histogram import BulkHistogram

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))
REROTATION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
STEP_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CHOICE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
WATCHED_REFUSALS = ("queue_full", "too_many_requests", "deadline_exceeded", "invalid_api_key", "internal_error")
"""Codes that are counted from 0, so that the first of them is seen as a rise."""
PLAN_BUCKETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)


class Composition(NamedTuple):
    """What a step consists of: tokens, those of sequences that decode, and plans."""

    tokens: int
    decoding: int
    plans: int

    @classmethod
    def of(cls, step: Mapping[Sequence, int]) -> "Composition":
        """That of a step that has not been computed yet."""
        decoding = sum(tokens for sequence, tokens in step.items() if sequence.num_uncomputed == 1)
        return cls(sum(step.values()), decoding, len({sequence.plan for sequence in step}))


class Observer(Protocol):
    """Told of single sequences, on the engine's thread: must neither block nor raise."""

    def rerotated(self, rerotation: Rerotation, seconds: float) -> None:
        """Keys of a sequence have been moved, which took so long."""

    def ended(self, sequence: Sequence, event: FinishEvent) -> None:
        """A sequence has ended; its request has not heard of it."""


class Metrics:
    """All metrics of one server.

    Attributes:
        registry: where they are.
        observer: hears of each sequence; None for nobody.
    """

    def __init__(self, registry: CollectorRegistry, observer: Observer | None = None) -> None:
        self.registry = registry
        self.observer = observer
        ProcessCollector(registry=registry)
        self.memory = MemoryCollector()
        registry.register(self.memory)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ropewalk_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"ropewalk_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"ropewalk_{name}", text, labels, buckets=buckets, registry=registry)

        self.ready = gauge("ready", "Whether requests are taken: 1 while /ready answers 200, else 0.")
        self.running = gauge("num_requests_running", "Requests in the running batch.")
        self.waiting = gauge("num_requests_waiting", "Admitted requests that wait to run.")
        self.cache_usage = gauge("kv_cache_usage_ratio", "Share of the cache's pages in use, 0 to 1.")
        self.cache_used_bytes = gauge("kv_cache_used_bytes", "Bytes of the cache's pages in use.")
        self.cache_bytes = gauge("kv_cache_bytes", "Bytes of all the cache's pages.")
        self.cache_pages = gauge("kv_cache_pages", "Pages of the cache, each of one group of layers.")
        self.cache_tokens = gauge("kv_cache_tokens", "Tokens of short sequences that the cache can hold.")
        self.cache_page_tokens = gauge("kv_cache_page_tokens", "Tokens in a page of the cache.")
        self.cache_requests = gauge("kv_cache_max_length_requests", "Requests of the maximum length that it can hold.")
        self.cache_kept_bytes = gauge("kv_cache_kept_bytes", "Bytes of free pages that are kept to be found again.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.preemptions = counter("num_preemptions", "Times that a request gave its pages back to be computed later.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked for in the cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.", "kind")
        self.cache_evictions = counter("kv_cache_evictions", "Pages that were kept and had to make room.")
        self.rerotations = counter("rerotations", "Times that cached keys were moved to another plan.")
        self.rerotated_tokens = counter("rerotated_tokens", "Tokens whose cached keys were moved to another plan.")
        self.rerotation_seconds = histogram(
            "rerotation_seconds", "Moving the cached keys of one request to another plan.", REROTATION_BUCKETS
        )
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Guesses at what follows that were computed.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Guesses that were right.")
        self.finished = counter("request_success", "Requests ended, by reason.", "finished_reason")
        self.planned = counter("request_plan", "Requests admitted, by positional plan.", "scheme", "mode", "factor")
        self.refused = counter("request_refused", "Requests refused, or ended by a limit, by error code.", "code")
        for code in WATCHED_REFUSALS:
            self.refused.labels(code)
        self.promotions = counter("promotions", "Requests that moved to a higher rung.", "growth", "factor")
        self.step_tokens = counter("step_tokens", "Tokens computed: of prompts, and those that decode.", "kind")
        self.step_seconds = histogram("step_seconds", "Time that a step spends in each phase.", STEP_BUCKETS, "phase")
        self._decoded, self._prefilled = self.step_tokens.labels("decode"), self.step_tokens.labels("prefill")
        self._phases = {
            name: self.step_seconds.labels(name) for name in ("schedule", "copy", "rerotate", "forward", "sample")
        }
        self.step_failures = counter("step_failures", "Steps of the engine that raised an error.")
        self.step_under_way = gauge("step_under_way_seconds", "How long the step under way has been running.")
        self.first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = BulkHistogram(
            "ropewalk_inter_token_latency_seconds", "Between two tokens of a request.", INTER_TOKEN_BUCKETS, registry
        )
        self.latency = histogram("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_BUCKETS)
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to the first step.", REQUEST_BUCKETS)
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", REQUEST_BUCKETS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self.request_max_tokens = histogram(
            "request_params_max_tokens", "Tokens that a request may generate.", TOKEN_BUCKETS
        )
        self.request_n = histogram("request_params_n", "Choices that a request asks for.", CHOICE_BUCKETS)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens of a request.", TOKEN_BUCKETS
        )
        self.iteration_tokens = histogram("iteration_tokens", "Tokens computed in one step.", TOKEN_BUCKETS)
        self.iteration_plans = histogram("iteration_plans", "Different plans in one step.", PLAN_BUCKETS)
        for kind in ("same-plan", "other-plan"):
            self.prefix_hits.labels(kind)
        for reason in FinishReason:
            self.finished.labels(reason.value)

    def observe_admission(self, sequence: Sequence) -> None:
        """Count a request under its plan."""
        choice = sequence.choice
        self.request_max_tokens.observe(sequence.sampling.max_tokens)
        self.planned.labels(choice.plan.scheme, choice.mode, f"{choice.plan.factor:g}").inc()

    def observe_promotion(self, sequence: Sequence) -> None:
        """Count a request that has just moved to the next rung."""
        self.promotions.labels(sequence.choice.growth, f"{sequence.last_plan.factor:g}").inc()

    def observe_step(self, composition: Composition) -> None:
        """Count a step that was computed."""
        self._decoded.inc(composition.decoding)
        self._prefilled.inc(composition.tokens - composition.decoding)
        self.iteration_tokens.observe(composition.tokens)
        self.iteration_plans.observe(composition.plans)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of a step, whether or not it ends well."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name].observe(time.perf_counter() - start)

    def observe_rerotation(self, rerotation: Rerotation, seconds: float) -> None:
        """Count one re-rotation."""
        self.rerotations.inc()
        self.rerotated_tokens.inc(rerotation.tokens)
        self.rerotation_seconds.observe(seconds)
        if self.observer is not None:
            self.observer.rerotated(rerotation, seconds)

    def observe_tokens(self, sequences: Collection[Sequence], now: float) -> None:
        """Count a generated token of each of some sequences, which still hold the time of the one before it."""
        self.generation_tokens.inc(len(sequences))
        intervals = []
        for sequence in sequences:
            if sequence.last_token_time is None:
                self.first_token.observe(now - sequence.arrival_time)
                self._observe_prefix(sequence)
            else:
                intervals.append(now - sequence.last_token_time)
        self.inter_token.observe(intervals)

    def _observe_prefix(self, sequence: Sequence) -> None:
        if sequence.num_prefix_tokens is None:
            return
        other = sequence.num_other_plan_prefix_tokens
        self.prefix_queries.inc(len(sequence.prompt))
        self.prefix_hits.labels("same-plan").inc(sequence.num_prefix_tokens - other)
        self.prefix_hits.labels("other-plan").inc(other)

    def observe_end(self, sequence: Sequence, event: FinishEvent) -> None:
        """Count a request that has ended. Times of stages that it never reached are not observed."""
        if self.observer is not None:
            self.observer.ended(sequence, event)
        self.finished.labels(event.reason.value).inc()
        self.latency.observe(event.timing.total)
        if sequence.scheduled_time is not None:
            self.queue_time.observe(event.timing.queue)
        if sequence.first_token_time is not None:
            self.prefill_time.observe(event.timing.prefill)
            self.decode_time.observe(event.timing.decode)
            self.prompt_tokens.inc(len(sequence.prompt))
            self.request_prompt_tokens.observe(len(sequence.prompt))
            self.request_generation_tokens.observe(len(sequence.output))


class MemoryCollector(Collector):
    """Memory of the process and of each CUDA device, read when Prometheus asks.

    Attributes:
        held: bytes that the server itself has reserved, by kind: weights, cache.
    """

    def __init__(self) -> None:
        self.held: dict[str, float] = {}

    def collect(self) -> Iterable[GaugeMetricFamily]:
        kinds = {**self.held, "process": psutil.Process().memory_info().rss}
        if torch.cuda.device_count() > 0 and self.held:
            allocated = torch.cuda.max_memory_allocated()
            kinds["activations_peak"] = max(0.0, allocated - sum(self.held.values()))
        by_kind = GaugeMetricFamily(
            "ropewalk_memory_bytes",
            "Memory: weights and cache as reserved, the process as resident, activations at their peak (CUDA only).",
            labels=["kind"],
        )
        for kind, value in kinds.items():
            by_kind.add_metric([kind], value)
        yield by_kind
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        yield GaugeMetricFamily("ropewalk_process_memory_peak_bytes", "Largest resident memory so far.", value=peak)
        if torch.cuda.device_count() == 0:
            return
        readings = (
            ("allocated", "Device memory held by tensors.", torch.cuda.memory_allocated),
            ("reserved", "Device memory held by the allocator.", torch.cuda.memory_reserved),
            ("peak", "Largest device memory held by tensors so far.", torch.cuda.max_memory_allocated),
        )
        for name, text, read in readings:
            family = GaugeMetricFamily(f"ropewalk_device_memory_{name}_bytes", text, labels=["device"])
            for device in range(torch.cuda.device_count()):
                family.add_metric([str(device)], read(device))
            yield family
