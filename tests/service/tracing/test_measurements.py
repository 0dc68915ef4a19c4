"""The histograms have the conventions' names, units and buckets, and the numbers that the answers have."""

import pytest
from opentelemetry.sdk.metrics.export import Histogram
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from tests.service.tracing.recording import Recording
from tests.serving import MODEL, FakeServer

LABELS = {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "ropewalk",
    "gen_ai.request.model": MODEL,
    "gen_ai.response.model": MODEL,
}
CONVENTIONS = {
    gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION: (
        *("s", "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92"),
    ),
    gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: (
        *("s", "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10"),
    ),
    gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: (
        *("s", "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5"),
    ),
    gen_ai_metrics.GEN_AI_CLIENT_TOKEN_USAGE: (
        *("{token}", "1 4 16 64 256 1024 4096 16384 65536 262144 1048576 4194304 16777216 67108864"),
    ),
}
"""Unit and buckets, as the text of the conventions has them."""


def generate(server: FakeServer, **fields: object) -> dict[str, dict[str, float]]:
    answer: dict[str, dict[str, float]] = server.client.post("/generate", json={"prompt": "abc", **fields}).json()
    return answer


@pytest.mark.parametrize("name", sorted(CONVENTIONS))
def test_a_histogram_is_as_the_conventions_have_it(server: FakeServer, recording: Recording, name: str) -> None:
    generate(server, max_tokens=3, ignore_eos=True)
    recording.request()
    metric = recording.metrics()[name]
    unit, buckets = CONVENTIONS[name]
    assert metric.unit == unit
    assert isinstance(metric.data, Histogram)
    assert list(metric.data.data_points[0].explicit_bounds) == pytest.approx([float(b) for b in buckets.split()])


def test_there_are_no_others(server: FakeServer, recording: Recording) -> None:
    generate(server, max_tokens=3, ignore_eos=True)
    recording.request()
    assert recording.metrics().keys() == CONVENTIONS.keys()


def test_the_numbers_are_those_of_the_answer(server: FakeServer, recording: Recording) -> None:
    timing = generate(server, max_tokens=5, ignore_eos=True)["timing"]
    recording.request()
    (first,) = recording.points("gen_ai.server.time_to_first_token")
    (per_token,) = recording.points("gen_ai.server.time_per_output_token")
    (duration,) = recording.points("gen_ai.server.request.duration")
    assert first.sum == pytest.approx(timing["time_to_first_token_seconds"], abs=1e-6)
    assert per_token.sum == pytest.approx(timing["decode_seconds"] / 4, abs=1e-6)
    assert duration.sum > timing["total_seconds"]
    assert {point.count for point in (first, per_token, duration)} == {1}
    assert all(dict(point.attributes or {}) == LABELS for point in (first, per_token, duration))


def test_tokens_are_told_by_kind(server: FakeServer, recording: Recording) -> None:
    generate(server, max_tokens=5, ignore_eos=True)
    recording.request()
    usage = {
        str((point.attributes or {})[gen_ai_attributes.GEN_AI_TOKEN_TYPE]): point.sum
        for point in recording.points("gen_ai.client.token.usage")
    }
    assert usage == {"input": 3, "output": 5}


def test_choices_are_measured_one_by_one_and_their_request_once(server: FakeServer, recording: Recording) -> None:
    body = {"model": MODEL, "prompt": "abc", "n": 3, "max_tokens": 2, "ignore_eos": True}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    recording.request()
    (per_token,) = recording.points("gen_ai.server.time_per_output_token")
    (first,) = recording.points("gen_ai.server.time_to_first_token")
    assert (per_token.count, first.count) == (3, 1)


def test_one_token_has_no_time_between_tokens(server: FakeServer, recording: Recording) -> None:
    generate(server, max_tokens=1)
    recording.request()
    assert recording.points("gen_ai.server.time_per_output_token") == []
    assert len(recording.points("gen_ai.server.time_to_first_token")) == 1


def test_a_refusal_counts_by_its_error_and_has_used_nothing(server: FakeServer, recording: Recording) -> None:
    generate(server, max_tokens=-1)
    recording.request()
    (duration,) = recording.points("gen_ai.server.request.duration")
    assert dict(duration.attributes or {}) == {**LABELS, "error.type": "400"}
    assert recording.metrics().keys() == {"gen_ai.server.request.duration"}
