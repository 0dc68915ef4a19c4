"""One choice of a request that has ended: its stages, and its part of what is measured. Knows no OpenTelemetry."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from service.core import FinishReason, Sequence
from service.tracing import names
from service.tracing.journal import Entry


class Stage(NamedTuple):
    """A stretch of a choice's life, on the monotonic clock, in seconds."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, int | float]


@dataclass(frozen=True)
class EndedChoice:
    """A sequence that has ended, and what the engine said of it."""

    sequence: Sequence
    entry: Entry

    @property
    def reason(self) -> FinishReason:
        assert self.entry.end is not None
        return self.entry.end.reason

    @property
    def first_token(self) -> float | None:
        """Seconds from arrival to the first token; None without one."""
        first = self.sequence.first_token_time
        return None if first is None else first - self.sequence.arrival_time

    @property
    def per_token(self) -> float | None:
        """Mean seconds of a token after the first; None where there is none, or the choice did not end well."""
        following = len(self.sequence.output) - 1
        if following < 1 or self.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return None
        assert self.entry.end is not None
        return self.entry.end.timing.decode / following

    def stages(self) -> Iterator[Stage]:
        """Those that it reached; the one that it ended in ends with it."""
        sequence = self.sequence
        assert self.entry.end is not None
        end = sequence.arrival_time + self.entry.end.timing.total
        scheduled, first = sequence.scheduled_time, sequence.first_token_time
        yield Stage("queue", sequence.arrival_time, scheduled or end, {})
        if scheduled is not None:
            yield Stage("prefill", scheduled, first or end, {})
        if first is not None:
            yield Stage("decode", first, end, {})
        for move in self.entry.moves:
            moved = {names.ROPE_FACTOR: move.factor, names.ROPE_TOKENS: move.tokens}
            yield Stage("rerotate", move.start, move.end, moved)
