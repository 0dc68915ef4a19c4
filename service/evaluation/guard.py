"""The short-text guard: what a prompt within the native length pays for the server's ability to take longer ones.

Under the policy it must pay nothing: logits equal to the last bit. Beside it, what scaling that is always on costs. Two
runs of their own are compared, the native one under a plan that the policy has no part in.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from service.evaluation.bench import Bench
from service.evaluation.bootstrap import paired_bootstrap
from service.evaluation.figures import Shown, Table
from service.evaluation.ledger import Job, Ledger
from service.evaluation.likelihood import DIGITS
from service.evaluation.schemes import POLICY, SchemeAsked, choose, fixed, native_plan
from service.evaluation.texts import name_of
from service.scaling.policy import PlanChoice

NATIVE = "native"


def jobs(bench: Bench) -> list[Job]:
    """A cell for each short length, way and document: `digest` of the logits, and `nll`, the mean."""
    return [
        Job(_key(way, choice, length, document), length, partial(_score, bench, document[: length - 1], choice))
        for length in _short(bench)
        for way, choice in _ways(bench, length)
        for document in bench.cut(max(_short(bench)))
    ]


def _short(bench: Bench) -> list[int]:
    return [length for length in bench.lengths if length <= bench.policy.native_length]


def _ways(bench: Bench, length: int) -> Iterator[tuple[str, PlanChoice]]:
    yield NATIVE, fixed(native_plan(bench.policy), length)
    served = choose(SchemeAsked(POLICY), bench.policy, length)
    if served is not None:
        yield POLICY, served
    for scheme in bench.schemes:
        always = choose(scheme, bench.policy, length)
        if scheme.is_always_on and always is not None:
            yield str(scheme), always


def _key(way: str, choice: PlanChoice, length: int, document: list[int]) -> dict[str, Any]:
    rotated = {"scheme": choice.plan.scheme, "factor": choice.plan.factor, "rotation": choice.plan.fingerprint}
    return {"measure": "guard", "way": way, **rotated, "length": length, "document": name_of(document[:length])}


def _score(bench: Bench, prompt: list[int], choice: PlanChoice) -> dict[str, Any]:
    scored = bench.driver.score(prompt, choice)
    return {"digest": scored.digest, "nll": round(float(np.mean(scored.nll)), DIGITS)}


def show(bench: Bench, ledger: Ledger) -> Shown:
    """Whether native and policy are the same, and the cost of always-on scaling."""
    shown = Shown("Short-text guard")
    if not _short(bench):
        shown.failed.append(f"no length is within the native length {bench.policy.native_length}: nothing was guarded")
        return shown
    documents = bench.cut(max(_short(bench)))
    count, rows = len(documents), []
    always = [str(scheme) for scheme in bench.schemes if scheme.is_always_on]
    for length in _short(bench):
        cells = {
            way: [ledger[_key(way, choice, length, document)] for document in documents]
            for way, choice in _ways(bench, length)
        }
        native = cells[NATIVE]
        same = [ours["digest"] == theirs["digest"] for ours, theirs in zip(native, cells.get(POLICY, []), strict=False)]
        if sum(same) < count:
            shown.failed.append(
                f"the policy changes short texts: {count - sum(same)} of {count} documents of {length} tokens have "
                "other logits than the native plan gives them"
            )
        costs = [
            str(paired_bootstrap([cell["nll"] for cell in cells[way]], [cell["nll"] for cell in native]))
            for way in always
        ]
        nll = np.mean([cell["nll"] for cell in native])
        rows.append([str(length), f"{nll:.3f}", f"{sum(same)} of {count}", *costs])
    head = ["tokens", "unscaled, nats a token", "policy identical to the last bit", *(f"{way}, more" for way in always)]
    note = "Always-on scaling: nats a token more than unscaled, with the 95 % interval of a paired bootstrap."
    shown.tables.append(Table("What short texts pay", head, rows, note))
    return shown
