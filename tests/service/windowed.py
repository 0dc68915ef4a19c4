"""A fake model whose layers see windows: it keeps for each group of layers the tokens that it is told to, and looks at
all that the group sees, and at nothing else."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch

from model_patches.plan import PositionPlan
from service.core import PageCopy, Rerotation, Sequence
from tests.fakes import PAGE_SIZE, VOCABULARY
from tests.service.growing import Load, answer

Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class Cell:
    """What is cached of a token in one group: the plan it was computed under, and the one its key is rotated under."""

    group: int
    token: int
    origin: PositionPlan
    plan: PositionPlan


class WindowedRunner:
    """A key that a group sees and that is another's, or is rotated or was computed under another plan than its sequence
    says, is an error. So what it answers follows from a sequence's tokens and its history."""

    def __init__(self, num_pages: int, windows: Windows) -> None:
        self._windows = windows
        self._slots: list[Cell | None] = [None] * (num_pages * PAGE_SIZE)

    def forward(self, step: Mapping[Sequence, int]) -> torch.Tensor:
        for sequence, tokens in step.items():
            self._write(sequence, sequence.num_computed + tokens)
        for sequence in step:
            self._read(sequence)
        rows = [
            answer(sequence.tokens(0, sequence.num_computed + place + 1), sequence.history[: sequence.stage + 1])
            for sequence, tokens in step.items()
            for place in sequence.logits_wanted(tokens)
        ]
        logits = torch.zeros(len(rows), VOCABULARY)
        logits[range(len(rows)), rows] = 10.0
        return logits

    def _write(self, sequence: Sequence, end: int) -> None:
        tokens = sequence.tokens(0, end)
        for group, table in enumerate(sequence.tables):
            for place in range(sequence.num_computed, end):
                page = table.pages[place // PAGE_SIZE - table.first]
                slot = page * PAGE_SIZE + place % PAGE_SIZE
                self._slots[slot] = Cell(group, tokens[place], sequence.plan, sequence.plan)

    def _read(self, sequence: Sequence) -> None:
        """What the first token of the step sees; later ones see less of the past."""
        tokens = sequence.tokens(0, sequence.num_computed)
        for group, (table, window) in enumerate(zip(sequence.tables, self._windows, strict=True)):
            first = 0 if window is None else max(0, sequence.num_computed - window + 1)
            for place in range(first, sequence.num_computed):
                assert place // PAGE_SIZE >= table.first, "a page of a live window was given back"
                page = table.pages[place // PAGE_SIZE - table.first]
                origin = [segment.plan for segment in sequence.history if segment.start <= place][-1]
                expected = Cell(group, tokens[place], origin, sequence.plan)
                assert self._slots[page * PAGE_SIZE + place % PAGE_SIZE] == expected

    def copy(self, copies: SequenceOf[PageCopy]) -> None:
        for copy in copies:
            for group, (source, target) in enumerate(zip(copy.sources, copy.targets, strict=True)):
                cells = self._slots[source * PAGE_SIZE : source * PAGE_SIZE + copy.tokens]
                assert all(cell is not None and cell.group == group for cell in cells)
                self._slots[target * PAGE_SIZE : target * PAGE_SIZE + copy.tokens] = cells

    def rerotate(self, rerotation: Rerotation) -> None:
        written = {move.target for move in rerotation.moves}
        assert written.isdisjoint(move.source for move in rerotation.moves if move.source != move.target)
        for move in rerotation.moves:
            for place in range(PAGE_SIZE):
                cell = self._slots[move.source * PAGE_SIZE + place]
                if move.number * PAGE_SIZE + place >= rerotation.tokens and rerotation.tokens % PAGE_SIZE:
                    continue  # the last page is not full
                assert cell is not None
                assert (cell.group, cell.plan) == (move.group, rerotation.old)
                self._slots[move.target * PAGE_SIZE + place] = replace(cell, plan=rerotation.new)


@dataclass
class WindowedLoad(Load):
    """The scheduler over that model, for groups of layers with these windows."""

    windows: Windows = (None, 6)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner = WindowedRunner(self.num_pages, self.windows)  # type: ignore[assignment]

    def held(self, sequence: Sequence) -> list[int]:
        """How many pages a sequence holds in each group."""
        return [len(table.pages) for table in sequence.tables]

    def check_holders(self) -> None:
        """Every page is held as often as tables name it, in one group only, and written by one sequence only."""
        named: dict[int, list[tuple[int, Sequence]]] = {}
        for sequence in self.live:
            for group, table in enumerate(sequence.tables):
                for page in table.pages:
                    named.setdefault(page, []).append((group, sequence))
        assert len(named) == self.pages.num_used
        for page, holders in named.items():
            assert self.pages.holders(page) == len(holders)
            assert len({group for group, _ in holders}) == 1
        for sequence in self.live:
            for table in sequence.tables:
                unwritten = table.pages[max(0, sequence.num_computed // PAGE_SIZE - table.first) :]
                assert all(self.pages.holders(page) == 1 for page in unwritten), "a shared page will be written"
                assert not any(page in self.pages.index for page in unwritten), "a known page will be written"
