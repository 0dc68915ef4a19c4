"""What the engine says of a sequence that the sequence itself does not keep.

Written on the engine's thread, read on the event loop; what nobody reads goes with its sequence.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from service.core import FinishEvent, Rerotation, Sequence


class Move(NamedTuple):
    """One re-rotation: start and end on the monotonic clock, in seconds, the factor moved to, and the tokens moved."""

    start: float
    end: float
    factor: float
    tokens: int


@dataclass
class Entry:
    """What was noted of one sequence.

    Attributes:
        moves: its re-rotations, those of a prefix that came from another plan included.
        end: how it ended; None while it lives.
    """

    moves: list[Move] = field(default_factory=list)
    end: FinishEvent | None = None


class Journal:
    """The entries of all sequences that somebody still holds."""

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[Sequence, Entry] = WeakKeyDictionary()

    def rerotated(self, rerotation: Rerotation, seconds: float) -> None:
        """Note a re-rotation that took so long and has just ended."""
        now = time.monotonic()
        self.of(rerotation.sequence).moves.append(Move(now - seconds, now, rerotation.new.factor, rerotation.tokens))

    def ended(self, sequence: Sequence, event: FinishEvent) -> None:
        """Note how a sequence ended; called before its request hears of it."""
        self.of(sequence).end = event

    def of(self, sequence: Sequence) -> Entry:
        """The entry of a sequence, an empty one if nothing was noted."""
        return self._entries.setdefault(sequence, Entry())
