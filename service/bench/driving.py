"""When requests are sent: so many at a time, or at given moments. Does not know what a request is.

Time is the event loop's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


async def closed_loop(items: Iterable[Item], concurrency: int, run: Callable[[Item], Awaitable[None]]) -> None:
    """Run all items, so many at a time: one that ends makes room for the next."""
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await run(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


async def open_loop(items: Iterable[Item], arrivals: Iterable[float], run: Callable[[Item], Awaitable[None]]) -> None:
    """Run each item at its moment, however many are under way.

    Args:
        items: to run.
        arrivals: seconds from now, rising, one for each item.
        run: runs an item.
    """
    now = asyncio.get_running_loop().time
    start = now()

    async with asyncio.TaskGroup() as group:
        for item, arrival in zip(items, arrivals, strict=False):  # arrivals go on for ever
            await asyncio.sleep(max(0.0, start + arrival - now()))
            group.create_task(_run(run, item))


async def _run(run: Callable[[Item], Awaitable[None]], item: Item) -> None:
    await run(item)
