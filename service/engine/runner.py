"""Runs the model for one step. Knows the model and its pool of pages; does not choose what runs or what follows."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from model_patches.pages import KeyValuePages
from model_patches.patch import PatchedModel
from model_patches.plan import PositionPlan
from model_patches.recorded import DecodeShape, Recorder
from model_patches.rerotation import PagesToMove, copy_pages, rerotate
from service import core
from service.cache.groups import LayerGroup
from service.cache.pages import PageAllocator
from service.engine import batch, sampler
from service.scaling.fixed import AnyPolicy


class Runner(Protocol):
    """What the engine needs of a model; a test puts a fake one here."""

    def forward(self, step: Mapping[core.Sequence, int]) -> torch.Tensor:
        """Compute a step in one pass of the model.

        Args:
            step: how many tokens of each sequence to compute; their pages are allocated.

        Returns:
            float32 logits [R, vocabulary], for each sequence after the tokens that `logits_wanted` names, in the
            step's order; good until the next step.
        """
        ...

    def rerotate(self, rerotation: core.Rerotation) -> None:
        """Move cached keys to another plan."""
        ...

    def copy(self, copies: Sequence[core.PageCopy]) -> None:
        """Copy pages: all are read before any is written."""
        ...


class ModelRunner:
    """The runner over a patched model and a pool of pages.

    Attributes:
        model: the model.
        pool: with a place for each layer of a page.
        groups: of layers that keep pages of their own; none where all layers keep the same and see everything.
        layers: for each of its layers, where that is in the pool: layers of different groups may share a place.
    """

    def __init__(self, model: PatchedModel, pool: list[KeyValuePages], groups: Sequence[LayerGroup] = ()) -> None:
        self.model = model
        self.pool = pool
        self.groups = groups
        place = {layer: place for group in groups for place, layer in enumerate(group.layers)}
        self.layers = [pool[place.get(layer, layer)] for layer in range(model.layers)]

    def record_decoding(self, longest: int, most_rows: int, record: Recorder) -> None:
        """Have decode steps replayed, where the model can: before the pool holds anything. Its last page must be
        nobody's.

        Args:
            longest: tokens of the longest sequence.
            most_rows: sequences of one step, at most.
            record: on the model's device.
        """
        windows = [group.window for group in self.groups] or [None]
        self.model.record_decoding(
            DecodeShape(self.layers, windows, batch.groups_of_layers(self.groups), longest, most_rows), record
        )

    def forward(self, step: Mapping[core.Sequence, int]) -> torch.Tensor:
        return self.compute(step)

    def compute(self, step: Mapping[batch.Row, int]) -> torch.Tensor:
        """The same of what is known of the sequences here."""
        tensors = batch.build(step, self.layers, self.model.plan_row, self.model.device, self.groups)
        return self.model.forward(
            tensors.token_ids, tensors.positions, tensors.plan_rows, tensors.logits_at, tensors.batch
        )

    def rerotate(self, rerotation: core.Rerotation) -> None:
        self.move(rerotation.moves, rerotation.old, rerotation.new)

    def move(self, pages_to_move: Sequence[core.PageMove], old: PositionPlan, new: PositionPlan) -> None:
        """The same of pages, whosever they are."""
        model = self.model
        for number, layers in enumerate([group.layers for group in self.groups] or [range(model.layers)]):
            moves = [(move.source, move.target, move.number) for move in pages_to_move if move.group == number]
            if not moves:
                continue
            rerotate(
                [self.layers[layer] for layer in layers],
                PagesToMove(*torch.tensor(moves, dtype=torch.int64, device=model.device).unbind(dim=1)),
                old,
                new,
                model.geometry.layout,
                model.rotary_offset,
                {place for place, layer in enumerate(layers) if layer in model.local_layers},
            )
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # so that its time and its errors are its own

    def copy(self, copies: Sequence[core.PageCopy]) -> None:
        self.copy_pages(*core.sources_and_targets(copies))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The same of pages, whosever they are."""
        copy_pages(self.layers, *torch.tensor([sources, targets], dtype=torch.int64, device=self.model.device))


def warm_up(runner: Runner, pages: PageAllocator, policy: AnyPolicy, groups: int = 1) -> None:
    """Run a short prefill and a decode of one sequence, so that no request pays for what happens only once."""
    choice = policy.choose(1, 1)
    sequence = core.Sequence("warm-up", [0, 0], choice, core.SamplingParams(max_tokens=1), deliver=lambda _: None)
    sequence.tables = [core.PageTable(0, pages.allocate(1)) for _ in range(groups)]
    for computed, tokens in ((0, 2), (1, 1)):
        sequence.num_computed = computed
        logits = runner.forward({sequence: tokens})
        sampler.sample(logits, sampler.prepare([sequence], logits.shape[-1], logits.device))
    for table in sequence.tables:
        pages.release(table.pages)
