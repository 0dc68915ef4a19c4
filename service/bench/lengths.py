"""Lengths in tokens, as the command line says them: fixed, from a range, or a weighted mix of both."""

import random
from argparse import ArgumentTypeError
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part of a mix: lengths from `low` to `high`, both included, all equally likely."""

    low: int
    high: int
    weight: float


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths.

    Attributes:
        text: as it was written.
        parts: of the mix, one at least.
    """

    text: str
    parts: tuple[Part, ...]

    @property
    def least(self) -> int:
        """The smallest length that can be drawn."""
        return min(part.low for part in self.parts)

    def draw(self, source: random.Random) -> int:
        """One length."""
        (part,) = source.choices(self.parts, [part.weight for part in self.parts])
        return source.randint(part.low, part.high)


def parse_lengths(text: str) -> Lengths:
    """Read `128`, `64:256` or `128=3,4000=1`, where what follows `=` is a weight.

    Raises:
        ArgumentTypeError: the text is none of these.
    """
    return Lengths(text, tuple(map(_parse_part, text.split(","))))


def _parse_part(text: str) -> Part:
    span, equals, weight = text.partition("=")
    low, colon, high = span.partition(":")
    try:
        part = Part(int(low), int(high if colon else low), float(weight) if equals else 1.0)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither N nor LOW:HIGH, with =WEIGHT after it or not") from None
    if not 1 <= part.low <= part.high:
        raise ArgumentTypeError(f"{text!r}: lengths are at least 1, and the first is not above the second")
    if not 0 < part.weight < float("inf"):
        raise ArgumentTypeError(f"{text!r}: a weight is above 0")
    return part
