"""Which ladder serves a set of lengths best, from what each rung costs at each of them. Knows numbers only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A rung that a ladder may have.

    Attributes:
        scheme: by which it scales.
        factor: how far.
        covers: tokens that it reaches to.
    """

    scheme: str
    factor: float
    covers: int


def best_ladder(lengths: Sequence[int], costs: Mapping[tuple[Candidate, int], float]) -> tuple[list[Candidate], float]:
    """The rungs whose mean cost over the lengths is least, each length served by the smallest rung that covers it.

    That is the policy's rule, so a small rung can be left out because a larger one serves its lengths better, but none
    can serve a length behind a smaller one's back. The mean is additive over the stretches between rungs, so that the
    best way to serve what a rung reaches does not depend on the rungs above it.

    Args:
        lengths: rising; the last must be covered by a candidate.
        costs: of each candidate at each length that it covers.

    Returns:
        The rungs, rising, the last of which serves the last length; and their mean cost.
    """
    by_reach: dict[int, list[Candidate]] = {}
    for candidate in dict.fromkeys(candidate for candidate, _ in costs):
        by_reach.setdefault(candidate.covers, []).append(candidate)
    best: dict[int, tuple[float, list[Candidate]]] = {0: (0.0, [])}  # reach → cost of all lengths up to it, and how
    for reach in sorted(by_reach):
        ways = [
            (cost + sum(costs[candidate, n] for n in lengths if before < n <= reach), [*rungs, candidate])
            for before, (cost, rungs) in best.items()
            for candidate in by_reach[reach]
            if any(before < n <= reach for n in lengths)
        ]
        if ways:
            best[reach] = min(ways, key=lambda way: (way[0], len(way[1])))
    cost, rungs = min(
        (way for reach, way in best.items() if reach >= lengths[-1]), key=lambda way: way[0], default=(math.nan, [])
    )
    assert rungs, "no candidate covers the longest length"
    return rungs, cost / len(lengths)
