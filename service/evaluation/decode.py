"""The decode path: a prompt below the native length, then given tokens one at a time across it.

One pass over a text says nothing of how keys cached under one plan serve the next. So the same tokens are decoded with
their keys re-rotated and with all computed again, both as served; and through two references that are not: stale keys,
left as they were rotated, and keys that were never rotated, which re-rotation must agree with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from service.evaluation.bench import Bench
from service.evaluation.bootstrap import paired_bootstrap
from service.evaluation.errors import EvaluationError
from service.evaluation.figures import Lines, Shown, Table
from service.evaluation.ledger import Job, Ledger
from service.evaluation.likelihood import DIGITS
from service.evaluation.schemes import growing
from service.evaluation.texts import name_of
from service.scaling.fixed import AnyPolicy, FixedPolicy
from service.scaling.policy import PlanChoice

BEFORE, AFTER = 32, 256  # tokens that are decoded on each side of the native length
POINTS = 32  # of the curve
WAYS = ("re-prefilled", "re-rotated", "unrotated", "stale")


@dataclass(frozen=True)
class Crossing:
    """
    Attributes:
        start: tokens of the prompt.
        native: the native length.
        end: tokens in all.
    """

    start: int
    native: int
    end: int


def crossing(policy: AnyPolicy) -> Crossing:
    """Where this model crosses its native length, and for how far it is followed.

    Raises:
        EvaluationError: the policy ends there.
    """
    native = policy.native_length
    end = min(native + AFTER, policy.max_length)
    if isinstance(policy, FixedPolicy):
        raise EvaluationError(f"--measure decode: no plan follows the first ({policy.why})")
    if len(policy.rungs) == 1 or end <= native:
        raise EvaluationError(f"--measure decode: the policy ends at the native length {native}, nothing is crossed")
    return Crossing(native - min(BEFORE, native // 2), native, end)


def jobs(bench: Bench) -> list[Job]:
    """A cell for each way and document: `nll`, of each decoded token."""
    place = crossing(bench.policy)
    return [
        Job(
            _key(way, _choice(bench.policy, place, way), document, place),
            place.end,
            partial(_decode, bench, way, document, place),
        )
        for way in WAYS
        for document in bench.cut(place.end)
    ]


def _choice(policy: AnyPolicy, place: Crossing, way: str) -> PlanChoice:
    return growing(policy, "reprefill" if way == "re-prefilled" else "rerotate", place.end - place.start)


def _key(way: str, choice: PlanChoice, document: list[int], place: Crossing) -> dict[str, Any]:
    path = [[plan.scheme, plan.factor, plan.fingerprint, plan.max_length] for plan in choice.rungs]
    return {"measure": "decode", "way": way, "path": path, "start": place.start, "document": name_of(document)}


def _decode(bench: Bench, way: str, document: list[int], place: Crossing) -> dict[str, Any]:
    choice = _choice(bench.policy, place, way)
    prompt, given = document[: place.start], document[place.start :]
    if way == "unrotated":
        nll = _unrotated(bench, prompt, given, choice)
    else:
        nll = bench.driver.force(prompt, given, choice, stale=way == "stale")
    return {"nll": [round(value, DIGITS) for value in nll]}


def _unrotated(bench: Bench, prompt: list[int], given: list[int], choice: PlanChoice) -> list[float]:
    """Each stretch between two rungs in one pass: without re-rotation, nothing can happen between its tokens."""
    model = bench.reference()
    model.clear()
    known = [*prompt, *given[:-1]]
    ends = [0, *(min(plan.max_length, len(known)) for plan in choice.rungs)]
    nll: list[float] = []
    for (start, end), plan in zip(pairwise(ends), choice.rungs, strict=True):
        if start == end:
            continue
        first = max(start, len(prompt) - 1)  # the first token whose successor is scored
        logits = model.forward(known[start:end], plan, max(0, end - first))
        scored = given[first + 1 - len(prompt) : end + 1 - len(prompt)]
        for row, token in zip(logits.log_softmax(dim=-1), scored, strict=True):
            nll.append(-float(row[token]))
    return nll


def show(bench: Bench, ledger: Ledger) -> Shown:
    """Before and after the crossing, each way against re-prefilling."""
    place, documents = crossing(bench.policy), bench.cut(crossing(bench.policy).end)
    found = {
        way: np.array(
            [ledger[_key(way, _choice(bench.policy, place, way), document, place)]["nll"] for document in documents]
        )
        for way in WAYS
    }
    return Shown("The decode path", [_table(found, place)], [_curve(found, place)])


def _table(found: Mapping[str, Any], place: Crossing) -> Table:
    # Token n + 1 is the first that is predicted under the next plan: token n, the first beyond, is computed under it.
    under_next = place.native + 1 - place.start
    rows = []
    for way, nll in found.items():
        after: Sequence[float] = nll[:, under_next:].mean(axis=1).tolist()
        exact: Sequence[float] = found["re-prefilled"][:, under_next:].mean(axis=1).tolist()
        against = "" if way == "re-prefilled" else str(paired_bootstrap(after, exact))
        rows.append([way, f"{nll[:, :under_next].mean():.3f}", f"{np.mean(after):.3f}", against])
    note = f"Prefill of {place.start} tokens, native length {place.native}, decoded up to {place.end}; "
    note += f"{len(found['stale'])} documents. Stale and unrotated keys are references that are never served."
    head = ["cached keys", "nats a token before", "after", "more than re-prefilled [95 %]"]
    return Table("Decoding across the native length", head, rows, note)


def _curve(found: Mapping[str, Any], place: Crossing) -> Lines:
    count = place.end - place.start
    edges = np.linspace(0, count, min(POINTS, count) + 1).astype(int).tolist()
    curves = {
        way: [(float(place.start + high), float(nll[:, low:high].mean())) for low, high in pairwise(edges)]
        for way, nll in found.items()
    }
    title = "Decoding across the native length"
    return Lines("decode", title, "position", "nats a token", curves, float(place.native))
