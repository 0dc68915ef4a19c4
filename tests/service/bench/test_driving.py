"""When requests are sent, on a clock that jumps."""

import asyncio

from service.bench.driving import closed_loop, open_loop
from tests.service.bench.virtual_time import run_virtually


class Runs:
    """Items that take as many seconds as they say.

    Attributes:
        spans: of each item, when it began and ended.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    async def __call__(self, seconds: float) -> None:
        now = asyncio.get_running_loop().time
        start = now()
        await asyncio.sleep(seconds)
        self.spans.append((start, round(now(), 6)))


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    runs = Runs()
    run_virtually(closed_loop([3.0, 1.0, 1.0, 1.0, 2.0], 2, runs))
    assert sorted(runs.spans) == [(0, 1), (0, 3), (1, 2), (2, 3), (3, 5)]


def test_more_room_than_items_is_no_harm() -> None:
    runs = Runs()
    run_virtually(closed_loop([1.0], 8, runs))
    assert runs.spans == [(0, 1)]


def test_an_open_loop_sends_at_each_moment_whatever_is_under_way() -> None:
    runs = Runs()
    run_virtually(open_loop([9.0, 1.0, 1.0], iter([0.0, 0.5, 4.0, 5.0]), runs))
    assert sorted(runs.spans) == [(0, 9), (0.5, 1.5), (4, 5)]
