"""What a measurement shows: tables, and figures as numbers. Knows neither Markdown nor matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """
    Attributes:
        title: what the numbers are, and their unit.
        head: names of the columns; the first is that of the rows' names.
        rows: as they are shown.
        note: what a reader has to know.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Lines:
    """Curves over a common axis.

    Attributes:
        name: of the file, without its ending.
        title: what is shown.
        across: the horizontal axis, with its unit.
        up: the vertical axis, with its unit.
        curves: name to (x, y), x rising.
        marked: an x that matters, such as the native length.
    """

    name: str
    title: str
    across: str
    up: str
    curves: dict[str, list[tuple[float, float]]]
    marked: float | None = None


@dataclass(frozen=True)
class HeatMap:
    """Shares from 0 to 1 in rows and columns; None where nothing was measured."""

    name: str
    title: str
    across: str
    up: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Shown:
    """What one measurement has to show.

    Attributes:
        title: of its section.
        tables: in order.
        figures: in order.
        failed: what the measurement found that must not be, one line each.
    """

    title: str
    tables: list[Table] = field(default_factory=list)
    figures: list[Lines | HeatMap] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
