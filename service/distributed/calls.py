"""What rank 0 tells the others to do. Each call is carried out on a rank's own runner, over its own pages.

Knows runners and what they need to know of sequences. Does not know how calls travel; they are plain data.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from model_patches.plan import PositionPlan
from service.core import PageCopy, PageMove, PageTable, Rerotation, Sequence, sources_and_targets
from service.engine.runner import ModelRunner


@dataclass(frozen=True, eq=False)
class Part:
    """One sequence's part in a step: all that the step's tensors are made of (`service.engine.batch.Computed`).

    Attributes:
        num_computed: tokens whose keys and values are in the pages.
        plan: with its frequencies, so that a rank needs no memory of plans but its model's own table.
        tables: of the sequence's pages in each group of layers.
        token_ids: those to be computed.
        logits_at: after which of them logits are wanted.
    """

    num_computed: int
    plan: PositionPlan
    tables: list[PageTable]
    token_ids: list[int]
    logits_at: list[int]

    def tokens(self, start: int, stop: int) -> list[int]:
        """As `core.Sequence.tokens`, of the step's own tokens only."""
        assert (start, stop) == (self.num_computed, self.num_computed + len(self.token_ids))
        return self.token_ids

    def logits_wanted(self, tokens: int) -> list[int]:
        """As `core.Sequence.logits_wanted`."""
        assert tokens == len(self.token_ids)
        return self.logits_at


@dataclass(frozen=True)
class Forward:
    """Compute a step."""

    parts: list[Part]

    @classmethod
    def of(cls, step: Mapping[Sequence, int]) -> "Forward":
        """The call for a step as `Runner.forward` takes it."""
        return cls(
            [
                Part(
                    sequence.num_computed,
                    sequence.plan,
                    sequence.tables,
                    sequence.tokens(sequence.num_computed, sequence.num_computed + tokens),
                    sequence.logits_wanted(tokens),
                )
                for sequence, tokens in step.items()
            ]
        )

    def carry_out(self, runner: ModelRunner) -> None:
        runner.compute({part: len(part.token_ids) for part in self.parts})


@dataclass(frozen=True)
class Rerotate:
    """Move cached keys to another plan."""

    old: PositionPlan
    new: PositionPlan
    moves: list[PageMove]

    @classmethod
    def of(cls, rerotation: Rerotation) -> "Rerotate":
        """The call for a re-rotation as `Runner.rerotate` takes it."""
        return cls(rerotation.old, rerotation.new, rerotation.moves)

    def carry_out(self, runner: ModelRunner) -> None:
        runner.move(self.moves, self.old, self.new)


@dataclass(frozen=True)
class Copy:
    """Copy pages."""

    sources: list[int]
    targets: list[int]

    @classmethod
    def of(cls, copies: Iterable[PageCopy]) -> "Copy":
        """The call for copies as `Runner.copy` takes them."""
        return cls(*sources_and_targets(copies))

    def carry_out(self, runner: ModelRunner) -> None:
        runner.copy_pages(self.sources, self.targets)


Call = Forward | Rerotate | Copy
