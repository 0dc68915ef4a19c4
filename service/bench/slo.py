"""Service-level objectives: limits on what one request may take."""

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Slo:
    """Limits in seconds; None for no limit.

    Attributes:
        ttft: time to the first token.
        itl: mean time between tokens.
        e2e: time to the end of the answer.
    """

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def is_met_by(self, times: Mapping[str, float | None]) -> bool:
        """Whether a request's times, by the names above, are within the limits. A time that it has none of, such as
        that between tokens where only one came, breaks none."""
        return all(
            limit is None or (taken := times[name]) is None or taken <= limit for name, limit in asdict(self).items()
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {limit:g} s" for name, limit in asdict(self).items() if limit is not None)


def parse_slo(text: str) -> Slo:
    """Read `ttft:2,itl:0.1`.

    Raises:
        ArgumentTypeError: a name is unknown, or a limit is no number of seconds above 0.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, limit = part.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            raise ArgumentTypeError(f"{part!r} is not NAME:SECONDS") from None
        if name not in Slo.__dataclass_fields__:
            raise ArgumentTypeError(f"{name!r} is none of {', '.join(Slo.__dataclass_fields__)}")
        if not limits[name] > 0:
            raise ArgumentTypeError(f"{part!r}: a limit is above 0")
    return Slo(**limits)
