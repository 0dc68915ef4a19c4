"""From outcomes to figures. Knows neither how they were measured nor how figures are shown."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from service.bench.measuring import Outcome
from service.bench.slo import Slo

TIMES = ("ttft", "itl", "longest_gap", "e2e")
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """Of one time over the requests that succeeded, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """The figures of a run.

    Attributes:
        tried: requests that were sent.
        succeeded: of those.
        refused: turned away by a busy server.
        failed: otherwise.
        unfinished: under way when the run was broken off.
        errors: how often each error code came.
        seconds: from the first request to the last answer.
        prompt_tokens: of the requests that succeeded.
        cached_tokens: of those, from the server's cache.
        output_tokens: of the requests that succeeded.
        requests_per_second: those that succeeded.
        output_tokens_per_second: likewise.
        total_tokens_per_second: of prompts too.
        goodput: requests a second that succeeded within all limits; None without limits.
        good_share: their share of all that were tried.
        prompts_off: requests whose prompt the server counted otherwise than planned.
        ended_early: answers shorter than asked for.
        uncounted: answers without usage, whose tokens are counted by chunks.
        times: of those that have them, see `TIMES`.
    """

    tried: int
    succeeded: int
    refused: int
    failed: int
    unfinished: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput: float | None
    good_share: float | None
    prompts_off: int
    ended_early: int
    uncounted: int
    times: dict[str, Distribution]


def summarize(outcomes: Sequence[Outcome], *, seconds: float, slo: Slo, unfinished: int = 0) -> Summary:
    """The figures of a run.

    Args:
        outcomes: of all requests that ended.
        seconds: how long the run took.
        slo: limits for goodput.
        unfinished: requests that were sent and did not end.
    """
    well = [outcome for outcome in outcomes if outcome.error is None]
    statuses = Counter(outcome.status for outcome in outcomes)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in well)
    output_tokens = sum(outcome.output_tokens for outcome in well)
    good = sum(slo.is_met_by(outcome.times) for outcome in well) if slo != Slo() else None
    tried = len(outcomes) + unfinished
    return Summary(
        tried=tried,
        succeeded=len(well),
        refused=statuses["refused"],
        failed=statuses["failed"],
        unfinished=unfinished,
        errors=dict(Counter(code for outcome in outcomes if (code := outcome.error_code) is not None)),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(outcome.cached_tokens for outcome in well),
        output_tokens=output_tokens,
        requests_per_second=_rate(len(well), seconds),
        output_tokens_per_second=_rate(output_tokens, seconds),
        total_tokens_per_second=_rate(prompt_tokens + output_tokens, seconds),
        goodput=None if good is None else _rate(good, seconds),
        good_share=None if good is None or not tried else good / tried,
        prompts_off=sum(outcome.prompt_tokens != outcome.job.prompt_tokens for outcome in well),
        ended_early=sum(
            outcome.output_tokens < outcome.job.max_tokens for outcome in well if outcome.usage is not None
        ),
        uncounted=sum(outcome.usage is None for outcome in well),
        times={name: found for name in TIMES if (found := _distribution(outcome.times[name] for outcome in well))},
    )


def _rate(number: float, seconds: float) -> float:
    return number / seconds if seconds > 0 else 0.0


def _distribution(values: Iterable[float | None]) -> Distribution | None:
    known = sorted(value for value in values if value is not None)
    return Distribution(fmean(known), *(percentile(known, percent) for percent in PERCENTILES)) if known else None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, interpolated between neighbours (Hyndman and Fan 1996, type 7).

    Args:
        ordered: rising, one at least.
        percent: 0 to 100.
    """
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
