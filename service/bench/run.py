"""A run from a server that is known to its outcomes. Does not know how figures are made of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from service.bench.driving import closed_loop, open_loop
from service.bench.measuring import Outcome, measure
from service.bench.target import Target
from service.bench.workload import Job, poisson_arrivals
from service.client import AsyncClient


@dataclass
class Run:
    """What is known of a run, at any moment of it: one that is broken off leaves what came so far.

    Attributes:
        outcomes: of the requests that ended.
        sent: requests so far.
        started: when the first was sent, on the event loop's clock.
        ended: when the run ended or was broken off.
        on_progress: called after each request.
    """

    on_progress: Callable[[], object] = lambda: None
    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0
    started: float = 0.0
    ended: float = 0.0

    @property
    def unfinished(self) -> int:
        """Requests that were sent and have not ended."""
        return self.sent - len(self.outcomes)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.started


async def execute(
    run: Run, client: AsyncClient, target: Target, jobs: list[Job], *, concurrency: int, rate: float | None, seed: int
) -> None:
    """Send all jobs and note what becomes of them.

    Args:
        run: takes the outcomes.
        client: of the server.
        target: the server.
        jobs: to send.
        concurrency: requests under way, where there is no rate.
        rate: requests a second, at random times.
        seed: of those times.
    """

    async def send(job: Job) -> None:
        run.sent += 1
        run.outcomes.append(await measure(client, target.call(job.prompt, job.max_tokens), job))
        run.on_progress()

    now = asyncio.get_running_loop().time
    run.started = now()
    try:
        if rate is None:
            await closed_loop(jobs, concurrency, send)
        else:
            await open_loop(jobs, poisson_arrivals(rate, seed), send)
    finally:
        run.ended = now()
