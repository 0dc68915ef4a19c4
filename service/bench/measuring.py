"""One request, timed. Its clock is the event loop's."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from service.bench.endpoints import Chunk, Usage
from service.bench.workload import Job
from service.client import ApiError, AsyncClient, ClientError
from service.client.calls import StreamCall
from service.client.retrying import RETRIED_STATUS

Status = Literal["succeeded", "refused", "failed"]


@dataclass
class Outcome:
    """What became of one request. Times are in seconds, on the event loop's clock.

    Attributes:
        job: what was asked.
        started: when it was sent.
        ended: when its answer was complete, or it failed.
        error: what went wrong, None where nothing did.
        first: when the first token came, None if none did.
        last: when the last one came.
        longest_gap: between two chunks with output.
        chunks: with output.
        usage: as the server counted, None where it did not tell.
    """

    job: Job
    started: float
    ended: float = 0.0
    error: ClientError | None = None
    first: float | None = None
    last: float | None = None
    longest_gap: float | None = None
    chunks: int = 0
    usage: Usage | None = None

    @property
    def status(self) -> Status:
        """Refused is what a busy server turned away (429, 503)."""
        if self.error is None:
            return "succeeded"
        return "refused" if isinstance(self.error, ApiError) and self.error.status in RETRIED_STATUS else "failed"

    @property
    def error_code(self) -> str | None:
        """What went wrong, in a word."""
        if isinstance(self.error, ApiError):
            return self.error.code or str(self.error.status)
        return None if self.error is None else type(self.error).__name__

    @property
    def output_tokens(self) -> int:
        """Tokens generated; without usage, one for each chunk with output."""
        return self.chunks if self.usage is None else self.usage.completion_tokens

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt; without usage, as planned."""
        return self.job.prompt_tokens if self.usage is None else self.usage.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server had in its cache, as far as it tells."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    @property
    def times(self) -> dict[str, float | None]:
        """Time to first token, mean time between tokens, longest time without one, and end to end, in seconds.

        The mean time between tokens is that from the first to the last, by the number of tokens after the first, so
        that it is right however many tokens come in a chunk.
        """
        between = self.output_tokens - 1
        return {
            "ttft": None if self.first is None else self.first - self.started,
            "itl": None
            if self.first is None or self.last is None or between < 1
            else (self.last - self.first) / between,
            "longest_gap": self.longest_gap,
            "e2e": self.ended - self.started,
        }


async def measure(client: AsyncClient, call: StreamCall[Chunk], job: Job) -> Outcome:
    """Send one request and read its answer to the end."""
    now = asyncio.get_running_loop().time
    outcome = Outcome(job, now())
    try:
        async with client.stream(call) as stream:
            async for chunk in stream:
                _note(outcome, chunk, now())
    except ClientError as error:
        outcome.error = error
    outcome.ended = now()
    return outcome


def _note(outcome: Outcome, chunk: Chunk, now: float) -> None:
    if chunk.usage is not None:
        outcome.usage = chunk.usage
    if chunk.brings_output or (chunk.is_finish and outcome.first is None):  # tokens need not have a text
        if outcome.last is not None:
            outcome.longest_gap = max(outcome.longest_gap or 0.0, now - outcome.last)
        outcome.first = now if outcome.first is None else outcome.first
        outcome.last = now
        outcome.chunks += chunk.brings_output
