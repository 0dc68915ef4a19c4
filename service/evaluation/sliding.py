"""Sliding-window perplexity (Press et al., 2108.12409, appendix B): what a token is worth at the end of a full window.

A window of n tokens moves on by a stride; of each window, only the last stride's tokens are scored, so that every token
has nearly a whole window before it. Each window is a request of its own.
"""

from functools import partial
from typing import Any

import numpy as np

from service.evaluation.bench import Bench
from service.evaluation.figures import Lines, Shown, Table
from service.evaluation.ledger import Job, Ledger
from service.evaluation.likelihood import DIGITS, choices
from service.evaluation.texts import name_of
from service.scaling.policy import PlanChoice

STRIDE = 256
WINDOWS = 4


def jobs(bench: Bench) -> list[Job]:
    """A cell for each rotation, length and document: `nll`, the mean of each window."""
    return [
        Job(_key(choice, length, document), WINDOWS * length, partial(_score, bench, document, length, choice))
        for (_, length), choice in choices(bench).items()
        for document in bench.cut(_span(length))
    ]


def _span(length: int) -> int:
    return length + (WINDOWS - 1) * _stride(length)


def _stride(length: int) -> int:
    return min(STRIDE, length // 2)


def _key(choice: PlanChoice, length: int, document: list[int]) -> dict[str, Any]:
    plan = choice.plan
    named = {"scheme": plan.scheme, "factor": plan.factor, "rotation": plan.fingerprint}
    windows = {"length": length, "stride": _stride(length), "windows": WINDOWS}
    return {"measure": "sliding", **named, **windows, "document": name_of(document)}


def _score(bench: Bench, document: list[int], length: int, choice: PlanChoice) -> dict[str, Any]:
    stride = _stride(length)
    starts = range(0, WINDOWS * stride, stride)
    scored = [bench.driver.score(document[start : start + length - 1], choice).nll[-stride:] for start in starts]
    return {"nll": [round(float(np.mean(nll)), DIGITS) for nll in scored]}


def show(bench: Bench, ledger: Ledger) -> Shown:
    """Perplexity by scheme and length."""
    found: dict[str, list[tuple[float, float]]] = {}
    for (scheme, length), choice in choices(bench).items():
        means = [np.mean(ledger[_key(choice, length, document)]["nll"]) for document in bench.cut(_span(length))]
        found.setdefault(str(scheme), []).append((float(length), float(np.exp(np.mean(means)))))
    rows = [
        [scheme, *(f"{values[n]:.2f}" if n in values else "" for n in bench.lengths)]
        for scheme, points in found.items()
        for values in [dict(points)]
    ]
    note = f"{WINDOWS} windows of each document, {STRIDE} tokens apart, or half a window where that is less."
    return Shown(
        "Sliding-window perplexity",
        [Table("Perplexity at the end of a window", ["scheme", *map(str, bench.lengths)], rows, note)],
        [
            Lines(
                *("sliding", "Sliding-window perplexity", "window, tokens", "perplexity", found),
                float(bench.policy.native_length),
            )
        ],
    )
