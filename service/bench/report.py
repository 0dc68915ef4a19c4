"""Figures as a table for people and as JSON for programs. Computes none of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from service.bench.measuring import Outcome
from service.bench.slo import Slo
from service.bench.summary import TIMES, Summary

COLUMNS = ("mean", "p50", "p90", "p95", "p99")
LABELS = {
    "ttft": ("time to first token", 1.0, "s"),
    "itl": ("between tokens", 1e3, "ms"),
    "longest_gap": ("longest gap", 1e3, "ms"),
    "e2e": ("end to end", 1.0, "s"),
}


def table(summary: Summary, slo: Slo, load: Mapping[str, Any]) -> str:
    """The figures in lines.

    Args:
        summary: the figures.
        slo: the limits of its goodput.
        load: what was asked, name to value.
    """
    return "\n".join((*_head(summary, load), "", *_times(summary), *_rates(summary, slo), *_notes(summary)))


def as_json(
    summary: Summary, outcomes: Sequence[Outcome], slo: Slo, load: Mapping[str, Any], started: float
) -> dict[str, Any]:
    """The figures, and each request's, as JSON values; times are in seconds.

    Args:
        summary: the figures.
        outcomes: of the requests that ended.
        slo: the limits of its goodput.
        load: what was asked, name to value.
        started: when the run began, on the outcomes' clock.
    """
    requests = [
        {
            "started": outcome.started - started,
            "status": outcome.status,
            "error": None if outcome.error is None else str(outcome.error),
            "prompt_tokens": outcome.prompt_tokens,
            "output_tokens": outcome.output_tokens,
            "cached_tokens": outcome.cached_tokens,
            "chunks": outcome.chunks,
            **outcome.times,
        }
        for outcome in outcomes
    ]
    return {"load": dict(load), "slo": asdict(slo), "summary": asdict(summary), "requests": requests}


def _head(summary: Summary, load: Mapping[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{name} {value}" for name, value in load.items() if value is not None)
    parts = [f"{summary.tried} tried", f"{summary.succeeded} succeeded", f"{summary.refused} refused"]
    parts.append(f"{summary.failed} failed")
    if summary.unfinished:
        parts.append(f"{summary.unfinished} unfinished")
    yield f"requests: {', '.join(parts)} in {summary.seconds:.1f} s"
    if summary.errors:
        yield f"errors: {', '.join(f'{code} {number}' for code, number in sorted(summary.errors.items()))}"


def _times(summary: Summary) -> Iterator[str]:
    if not summary.times:
        return
    yield f"{'':24}" + "".join(f"{column:>10}" for column in COLUMNS)
    for name in TIMES:
        label, unit, sign = LABELS[name]
        if (found := summary.times.get(name)) is None:
            yield f"{f'{label}, {sign}':24}" + f"{'-':>10}" * len(COLUMNS)
            continue
        values = asdict(found)
        yield f"{f'{label}, {sign}':24}" + "".join(f"{_short(values[column] * unit):>10}" for column in COLUMNS)
    yield ""


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _rates(summary: Summary, slo: Slo) -> Iterator[str]:
    yield f"{'output tokens a second':24}{_short(summary.output_tokens_per_second):>10}"
    yield f"{'all tokens a second':24}{_short(summary.total_tokens_per_second):>10}"
    yield f"{'requests a second':24}{_short(summary.requests_per_second):>10}"
    if summary.goodput is not None and summary.good_share is not None:
        share = f"{summary.good_share:.0%} of requests within {slo}"
        yield f"{'goodput, requests/s':24}{_short(summary.goodput):>10}  ({share})"


def _notes(summary: Summary) -> Iterator[str]:
    """What makes the figures mean something else than was asked for."""
    if summary.cached_tokens:
        yield f"note: {summary.cached_tokens} of {summary.prompt_tokens} prompt tokens came from the server's cache"
    if summary.prompts_off:
        yield f"note: {summary.prompts_off} prompts had another length than planned, by the server's usage"
    if summary.ended_early:
        yield f"note: {summary.ended_early} answers ended before --max-tokens"
    if summary.uncounted:
        yield f"note: {summary.uncounted} answers had no usage: their tokens are counted by chunks"
