"""Negative log-likelihood by position: how well each token of a document is predicted, under each scheme and length.

A document of n tokens stands for a request of n tokens in all: its last token is the one to be generated, the others
are the prompt, and each of these but the first is scored. Shorter lengths are the beginnings of the longest. Under one
plan no token depends on a later one, so that one run at the longest length answers all shorter ones under the same
rotation; what rotates alike is run once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from service.evaluation.bench import Bench
from service.evaluation.bootstrap import Difference, paired_bootstrap
from service.evaluation.figures import Lines, Shown, Table
from service.evaluation.ledger import Job, Ledger
from service.evaluation.schemes import POLICY, SchemeAsked, choose
from service.evaluation.texts import name_of
from service.scaling.policy import PlanChoice

CURVE_POINTS = 64  # of the curve by position
DIGITS = 5
Nats = npt.NDArray[np.float64]
Wanted = Mapping[tuple[Any, int], PlanChoice]
"""The plans to score, by a name and the length in tokens."""


@dataclass(frozen=True)
class Run:
    """One plan over documents of so many tokens.

    Attributes:
        choice: the plan.
        length: in tokens.
    """

    choice: PlanChoice
    length: int

    def key(self, document: list[int]) -> dict[str, Any]:
        """Of the cell of one document, which is no shorter than the run."""
        plan = self.choice.plan
        return {
            "measure": "nll",
            "scheme": plan.scheme,
            "factor": plan.factor,
            "rotation": plan.fingerprint,
            "length": self.length,
            "document": name_of(document[: self.length - 1]),
        }


def jobs(bench: Bench) -> list[Job]:
    """A cell for each rotation and document: `nll`, of each scored token."""
    return jobs_of(bench, choices(bench), max(bench.lengths))


def jobs_of(bench: Bench, wanted: Wanted, longest: int) -> list[Job]:
    """The cells that answer for the plans and lengths wanted, over documents that are cut at `longest` tokens."""
    return [
        Job(run.key(document), run.length, partial(_score, bench, document[: run.length - 1], run.choice))
        for run in runs(wanted).values()
        for document in bench.cut(longest)
    ]


def _score(bench: Bench, prompt: list[int], choice: PlanChoice) -> dict[str, Any]:
    return {"nll": [round(value, DIGITS) for value in bench.driver.score(prompt, choice).nll]}


def choices(bench: Bench) -> dict[tuple[SchemeAsked, int], PlanChoice]:
    """The plans of each scheme at each length that it has one for."""
    pairs = ((scheme, length) for scheme in bench.schemes for length in bench.lengths)
    found = {pair: choose(pair[0], bench.policy, pair[1]) for pair in pairs}
    return {pair: choice for pair, choice in found.items() if choice is not None}


def runs(wanted: Wanted) -> dict[str, Run]:
    """The fewest runs that answer for all plans and lengths, by rotation."""
    needed: dict[str, Run] = {}
    for (_, length), choice in wanted.items():
        name = choice.plan.fingerprint
        if name not in needed or needed[name].length < length:
            needed[name] = Run(choice, length)
    return needed


def scores(bench: Bench, ledger: Ledger, wanted: Wanted, longest: int) -> dict[tuple[Any, int], list[Nats]]:
    """What was scored under each of the plans and lengths wanted: float64 [length − 2] for each document."""
    needed, cut = runs(wanted), bench.cut(longest)
    found = {}
    for (name, length), choice in wanted.items():
        run = needed[choice.plan.fingerprint]
        rows = (ledger[run.key(document)]["nll"] for document in cut)
        found[name, length] = [np.array(row[: length - 2], dtype=np.float64) for row in rows]
    return found


def show(bench: Bench, ledger: Ledger) -> Shown:
    """Tables by length and by position, the policy against the best, and curves."""
    scored = scores(bench, ledger, choices(bench), max(bench.lengths))
    shown = Shown("Negative log-likelihood", [_by_length(bench, scored)])
    if any(scheme.name == POLICY for scheme in bench.schemes):
        shown.tables.append(_policy_against_best(bench, scored))
    shown.tables.extend(_by_position(bench, scored, length) for length in bench.lengths)
    shown.figures.extend(_curves(bench, scored))
    return shown


Scores = Mapping[tuple[SchemeAsked, int], Sequence[Nats]]


def _mean(rows: Sequence[Nats]) -> float:
    return float(np.mean([row.mean() for row in rows]))


def _by_length(bench: Bench, scored: Scores) -> Table:
    rows = [
        [str(scheme), *(f"{_mean(found):.3f}" if (found := scored.get((scheme, n))) else "" for n in bench.lengths)]
        for scheme in bench.schemes
    ]
    count = max(len(rows) for rows in scored.values())
    note = f"Mean over {count} documents. Empty: the policy serves no such length."
    return Table("Nats a token, over the whole length", ["scheme", *map(str, bench.lengths)], rows, note)


def _policy_against_best(bench: Bench, scored: Scores) -> Table:
    rows = []
    for length in bench.lengths:
        others = {str(scheme): found for (scheme, n), found in scored.items() if n == length and scheme.name != POLICY}
        ours = scored.get((SchemeAsked(POLICY), length))
        if ours is None or not others:
            continue
        best = min(others, key=lambda name: _mean(others[name]))
        difference = compare(ours, others[best])
        rows.append([str(length), f"{_mean(ours):.3f}", best, f"{_mean(others[best]):.3f}", str(difference)])
    head = ["tokens", POLICY, "best of the others", "nats a token", f"{POLICY} less best [95 %]"]
    return Table("The policy against the best single scheme tried", head, rows, "Paired bootstrap over documents.")


def compare(ours: Sequence[Nats], theirs: Sequence[Nats]) -> Difference:
    """Of each document's mean."""
    return paired_bootstrap([float(row.mean()) for row in ours], [float(row.mean()) for row in theirs])


def _by_position(bench: Bench, scored: Scores, length: int) -> Table:
    edges = [0, *(edge for edge in bench.lengths if edge < length), length]
    rows = [
        [str(scheme), *(f"{_mean([row[low:high] for row in scored[scheme, length]]):.3f}" for low, high in pairs)]
        for scheme in bench.schemes
        if (scheme, length) in scored
        for pairs in [list(pairwise(edges))]
    ]
    head = ["scheme", *(f"{low} to {high}" for low, high in pairwise(edges))]
    return Table(f"Nats a token by position, of {length} tokens in all", head, rows)


def _curves(bench: Bench, scored: Scores) -> list[Lines]:
    native, longest = float(bench.policy.native_length), max(bench.lengths)
    by_length: dict[str, list[tuple[float, float]]] = {}
    for (scheme, length), found in scored.items():
        by_length.setdefault(str(scheme), []).append((float(length), _mean(found)))
    by_position = {}
    edges = np.linspace(0, longest - 2, min(CURVE_POINTS, longest - 2) + 1).astype(int).tolist()
    for scheme in bench.schemes:
        if (scheme, longest) in scored:
            rows = scored[scheme, longest]
            by_position[str(scheme)] = [
                (float(high), _mean([row[low:high] for row in rows])) for low, high in pairwise(edges)
            ]
    up = "nats a token"
    return [
        Lines("nll-by-length", "Negative log-likelihood by length", "tokens in all", up, by_length, native),
        Lines(
            "nll-by-position", f"Negative log-likelihood within {longest} tokens", "position", up, by_position, native
        ),
    ]
