"""The histograms of OpenTelemetry's GenAI conventions, with the buckets that the conventions name.

Knows names, units and buckets; measures nothing itself.
"""

from collections.abc import Mapping

from opentelemetry.metrics import Meter

from service.tracing import names
from service.tracing.outcome import Outcome

DURATION_BUCKETS = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
USAGE_BUCKETS = tuple(float(4**power) for power in range(14))


class Instruments:
    """The four histograms of one server."""

    def __init__(self, meter: Meter) -> None:
        self._duration = meter.create_histogram(
            *(names.REQUEST_DURATION, "s", "From a request's arrival to its last byte or token."),
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS,
        )
        self._first_token = meter.create_histogram(
            *(names.TIME_TO_FIRST_TOKEN, "s", "From a request's admission to its first token."),
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_BUCKETS,
        )
        self._per_token = meter.create_histogram(
            *(names.TIME_PER_OUTPUT_TOKEN, "s", "Mean time of a token after the first of its choice."),
            explicit_bucket_boundaries_advisory=PER_TOKEN_BUCKETS,
        )
        self._usage = meter.create_histogram(
            *(names.TOKEN_USAGE, "{token}", "Tokens of a request's prompts (input) and choices (output)."),
            explicit_bucket_boundaries_advisory=USAGE_BUCKETS,
        )

    def record(self, duration: float, outcome: Outcome | None, labels: Mapping[str, str]) -> None:
        """Record one request.

        Args:
            duration: from arrival to the end, in seconds.
            outcome: None for a request that was refused.
            labels: attributes of every measurement.
        """
        self._duration.record(duration, labels)
        if outcome is None:
            return
        if outcome.first_token is not None:
            self._first_token.record(outcome.first_token, labels)
        for seconds in outcome.per_token:
            self._per_token.record(seconds, labels)
        self._usage.record(outcome.input_tokens, {**labels, names.TOKEN_TYPE: "input"})
        self._usage.record(outcome.output_tokens, {**labels, names.TOKEN_TYPE: "output"})
