"""From a model and texts to the ladder that predicts them best.

Knows candidates, their likelihood cells and what is found out about each length. Does not know files or the command
line. A rung covers its factor times the native length, and its plan is computed for that, as the policy would.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from model_patches.errors import UnsupportedModelError
from model_patches.plan import make_plan
from service.evaluation import likelihood
from service.evaluation.bench import Bench
from service.evaluation.bootstrap import Difference
from service.evaluation.errors import EvaluationError
from service.evaluation.ladders import Candidate, best_ladder
from service.evaluation.ledger import Job, Ledger
from service.evaluation.likelihood import Nats, Wanted
from service.evaluation.schemes import SchemeAsked, choose, fixed, native_plan
from service.scaling.policy import PlanChoice, Policy

UNSCALED, CURRENT = "unscaled", "current policy"


@dataclass(frozen=True)
class Finding:
    """What was found out about requests of one length.

    Attributes:
        length: in tokens.
        chosen: the rung that serves it.
        nll: nats a token under that rung.
        best: the candidate that would serve this length best, whatever the ladder needs elsewhere.
        differences: what `nll` is more than under others, by their names.
    """

    length: int
    chosen: Candidate
    nll: float
    best: Candidate
    differences: Mapping[str, Difference]


def candidates(
    policy: Policy, schemes: Iterable[str], factors: Sequence[float] | None, longest: int
) -> list[Candidate]:
    """All rungs to try: each scheme at each factor below the one that just covers `longest`, and at that one.

    Args:
        policy: of the server; its native length is stretched.
        schemes: names.
        factors: above 1, rising; None for the rungs of the default ladder.
        longest: tokens.

    Raises:
        EvaluationError: nothing is to be stretched, or a scheme is not for this model.
    """
    geometry, native = policy.geometry, policy.native_length
    if geometry.is_scaled:
        raise EvaluationError(
            f"the model's own plan is scaled already ({geometry.scheme}) and all there is; "
            "--native-rope unscaled would make it a choice"
        )
    if longest <= native:
        raise EvaluationError(f"--max-length: {longest} is within the native length {native}, which is served unscaled")
    top = longest / native
    if factors is None:
        ladder = Policy(geometry, max_length=longest).ladder
        factors = [factor for factor in ladder if factor > 1]
    below = takewhile(lambda factor: factor < top, factors)
    reach = {factor: int(round(factor * native, 6)) for factor in below} | {top: longest}
    return [
        Candidate(scheme, factor, covers)
        for scheme in _known(schemes, policy)
        for factor, covers in reach.items()
        if covers > native
    ]


def _known(schemes: Iterable[str], policy: Policy) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in schemes))
    allowed = [name for name in policy.schemes if name != "default"]
    for name in names:
        if name not in allowed:
            raise EvaluationError(f"--schemes: {name!r} is not for this model: known are {', '.join(allowed)}")
    return names


def wanted(tried: Sequence[Candidate], policy: Policy) -> Wanted:
    """The plans to score: each candidate at all lengths that it covers, there no scaling, and what is served now."""
    lengths = sorted({candidate.covers for candidate in tried})
    found: dict[tuple[Any, int], PlanChoice] = {}
    for candidate in tried:
        try:
            plan = make_plan(policy.geometry, candidate.scheme, candidate.factor, candidate.covers)
        except UnsupportedModelError as error:
            raise EvaluationError(f"--schemes: {error}") from error
        found |= {(candidate, n): fixed(plan, n) for n in lengths if n <= candidate.covers}
    for length in lengths:
        found[UNSCALED, length] = fixed(native_plan(policy), length)
        served = choose(SchemeAsked("policy"), policy, length)
        if served is not None:
            found[CURRENT, length] = served
    return found


def jobs(bench: Bench, plans: Wanted) -> list[Job]:
    """The likelihood cells that a calibration needs; those of `ropewalk eval` serve it too."""
    return likelihood.jobs_of(bench, plans, max(length for _, length in plans))


def calibrate(bench: Bench, ledger: Ledger, plans: Wanted) -> list[Finding]:
    """The best ladder for these documents, as what it gives each length; see `best_ladder`."""
    scored = likelihood.scores(bench, ledger, plans, max(length for _, length in plans))
    costs = {
        (name, length): float(np.mean([row.mean() for row in rows]))
        for (name, length), rows in scored.items()
        if isinstance(name, Candidate)
    }
    lengths = sorted({length for _, length in plans})
    rungs, _ = best_ladder(lengths, costs)
    return [_found(length, rungs, costs, scored) for length in lengths]


def _found(
    length: int,
    rungs: Sequence[Candidate],
    costs: Mapping[tuple[Candidate, int], float],
    scored: Mapping[tuple[Any, int], Sequence[Nats]],
) -> Finding:
    chosen = next(rung for rung in rungs if rung.covers >= length)
    here = {candidate: cost for (candidate, n), cost in costs.items() if n == length}
    best = min(here, key=lambda candidate: here[candidate])
    others: dict[str, Any] = {name: name for name in (UNSCALED, CURRENT) if (name, length) in scored}
    rivals = [candidate for candidate in here if candidate != chosen]
    if rivals:
        rival = min(rivals, key=lambda candidate: here[candidate])
        others[f"next best, {described(rival)}"] = rival
    differences = {
        name: likelihood.compare(scored[chosen, length], scored[other, length]) for name, other in others.items()
    }
    return Finding(length, chosen, here[chosen], best, differences)


def described(candidate: Candidate) -> str:
    """In words."""
    return f"{candidate.scheme} {candidate.factor:g}"
