"""The best ladder, against trying all of them."""

import itertools
import random

import pytest

from service.evaluation.ladders import Candidate, best_ladder

LENGTHS = [10, 12, 16, 20]


def every_ladder(costs: dict[tuple[Candidate, int], float]) -> list[tuple[float, list[Candidate]]]:
    candidates = {candidate for candidate, _ in costs}
    options = [[None, *(c for c in candidates if c.covers == reach)] for reach in LENGTHS]
    ladders = [[c for c in picked if c is not None] for picked in itertools.product(*options)]
    return [
        (sum(costs[next(c for c in ladder if c.covers >= n), n] for n in LENGTHS) / len(LENGTHS), ladder)
        for ladder in ladders
        if ladder and ladder[-1].covers >= LENGTHS[-1]
    ]


@pytest.mark.parametrize("seed", range(30))
def test_no_other_ladder_is_better(seed: int) -> None:
    source = random.Random(seed)
    candidates = [Candidate(scheme, reach / 8, reach) for scheme in ("yarn", "ntk") for reach in LENGTHS]
    costs = {(c, n): source.random() for c in candidates for n in LENGTHS if n <= c.covers}
    rungs, cost = best_ladder(LENGTHS, costs)
    best_cost, best_rungs = min(every_ladder(costs), key=lambda way: way[0])
    assert cost == pytest.approx(best_cost)
    assert rungs == best_rungs


def test_of_equally_good_ladders_the_shortest_is_taken() -> None:
    candidates = [Candidate("yarn", reach / 8, reach) for reach in LENGTHS]
    costs = {(c, n): 1.0 for c in candidates for n in LENGTHS if n <= c.covers}
    assert best_ladder(LENGTHS, costs)[0] == [candidates[-1]]
