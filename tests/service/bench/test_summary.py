"""Figures are what an independent reckoning makes of the outcomes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.bench.endpoints import Details, Usage
from service.bench.measuring import Outcome
from service.bench.slo import Slo
from service.bench.summary import percentile, summarize
from service.bench.workload import Job
from service.client import ApiError, BrokenAnswerError, ClientError

BUSY = ApiError("busy", status=429, code="queue_full")


def outcome(
    start: float, first: float, end: float, *, tokens: int = 11, prompt: int = 100, error: ClientError | None = None
) -> Outcome:
    usage = Usage(prompt_tokens=prompt, completion_tokens=tokens, prompt_tokens_details=Details(cached_tokens=16))
    return Outcome(
        Job("x", 100, 11), start, end, error, start + first, end, longest_gap=0.5, chunks=tokens, usage=usage
    )


def failed(error: ClientError) -> Outcome:
    return Outcome(Job("x", 100, 11), 0.0, 1.0, error)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_counts_rates_and_goodput() -> None:
    outcomes = [
        outcome(0, 1, 5),  # 0.4 s between tokens
        outcome(1, 3, 6),  # 0.2
        outcome(2, 1, 4, tokens=9, prompt=101),  # 0.125
        failed(BUSY),
        failed(BUSY),
        failed(ApiError("no", status=503)),
        failed(BrokenAnswerError("broke")),
    ]
    summary = summarize(outcomes, seconds=10, slo=Slo(ttft=2), unfinished=1)
    counts = (summary.tried, summary.succeeded, summary.refused, summary.failed, summary.unfinished)
    assert counts == (8, 3, 3, 1, 1)
    assert summary.errors == {"queue_full": 2, "503": 1, "BrokenAnswerError": 1}
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (301, 48, 31)
    assert summary.requests_per_second == 0.3
    assert summary.output_tokens_per_second == 3.1
    assert summary.total_tokens_per_second == 33.2
    assert (summary.goodput, summary.good_share) == (0.2, 0.25)
    assert (summary.prompts_off, summary.ended_early, summary.uncounted) == (1, 1, 0)
    assert summary.times["ttft"].mean == pytest.approx(5 / 3)
    assert summary.times["itl"].p50 == pytest.approx(0.2)
    assert summary.times["itl"].p90 == pytest.approx(0.36)
    assert summary.times["e2e"].p99 == pytest.approx(5.0)
    assert summary.times["longest_gap"].p95 == 0.5


def test_a_request_that_failed_is_in_no_time_and_no_rate() -> None:
    summary = summarize([outcome(0, 1, 5, error=BrokenAnswerError("broke"))], seconds=5, slo=Slo(ttft=2))
    assert (summary.times, summary.output_tokens, summary.goodput) == ({}, 0, 0)


def test_without_limits_there_is_no_goodput() -> None:
    summary = summarize([outcome(0, 1, 5)], seconds=5, slo=Slo())
    assert (summary.goodput, summary.good_share) == (None, None)


def test_answers_without_usage_are_told_apart() -> None:
    plain = Outcome(Job("x", 100, 11), 0.0, 2.0, None, 1.0, 2.0, chunks=5)
    summary = summarize([plain], seconds=2, slo=Slo())
    assert (summary.uncounted, summary.ended_early, summary.prompts_off) == (1, 0, 0)
    assert (summary.prompt_tokens, summary.output_tokens) == (100, 5)


def test_a_run_without_requests_has_figures() -> None:
    summary = summarize([], seconds=0, slo=Slo(ttft=1))
    assert (summary.tried, summary.requests_per_second, summary.goodput, summary.good_share) == (0, 0, 0, None)
