"""Tensors for one step. Knows sequences and the layout of the pool; does not run a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from model_patches.attention import PagedBatch
from model_patches.pages import KeyValuePages
from model_patches.plan import PositionPlan
from service.cache.groups import LayerGroup
from service.core import PageTable

Integers = npt.NDArray[np.int64]


class Computed(Protocol):
    """What a step needs to know of a sequence: a `core.Sequence`, or what another process was told of one."""

    @property
    def num_computed(self) -> int: ...
    @property
    def plan(self) -> PositionPlan: ...
    @property
    def tables(self) -> list[PageTable]: ...
    def tokens(self, start: int, stop: int) -> list[int]: ...
    def logits_wanted(self, tokens: int) -> list[int]: ...


Row = TypeVar("Row", bound=Computed)


@dataclass(frozen=True)
class StepTensors:
    """What `PatchedModel.forward` takes; the fields are its arguments, in its order."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    plan_rows: torch.Tensor
    logits_at: torch.Tensor
    batch: PagedBatch


def build(
    step: Mapping[Row, int],
    layers: Sequence[KeyValuePages],
    plan_row: Callable[[PositionPlan], int],
    device: torch.device,
    groups: Sequence[LayerGroup] = (),
) -> StepTensors:
    """Lay out a step.

    Args:
        step: how many tokens of each sequence to compute; their pages are allocated.
        layers: of the model, each one's place in the pool.
        plan_row: the number of a plan for the model.
        device: where the model runs.
        groups: of layers that keep pages of their own; none where all layers keep the same and see everything.

    Returns:
        T = the sum of the step's tokens. Logits are asked for where `Sequence.logits_wanted` says so.
    """
    token_ids: list[int] = []
    logits_at: list[int] = []
    start_of: list[int] = []
    plan_row_of: list[int] = []
    for sequence, tokens in step.items():
        first, start = len(token_ids), sequence.num_computed
        token_ids += sequence.tokens(start, start + tokens)
        logits_at += [first + place for place in sequence.logits_wanted(tokens)]
        start_of.append(start)
        plan_row_of.append(plan_row(sequence.plan))
    counts, starts = np.array([*step.values()]), np.array(start_of)
    rows = np.repeat(np.arange(len(step)), counts)
    positions = np.arange(len(rows)) + (starts - np.cumsum(counts) + counts)[rows]
    return StepTensors(
        token_ids=on_device(device, np.array(token_ids)),
        positions=on_device(device, positions),
        plan_rows=on_device(device, np.array(plan_row_of)[rows]),
        logits_at=on_device(device, np.array(logits_at, np.int64)),
        batch=_page(step, positions, rows, starts, counts, layers, device, groups),
    )


def _page(
    step: Mapping[Row, int],
    positions: Integers,
    rows: Integers,
    starts: Integers,
    counts: Integers,
    layers: Sequence[KeyValuePages],
    device: torch.device,
    groups: Sequence[LayerGroup],
) -> PagedBatch:
    """Find every token's place in the pool.

    Args:
        step: as for `build`.
        positions: int64 [T].
        rows: int64 [T], which of the step's N sequences a token is of.
        starts: int64 [N], the position of each sequence's first token in this step.
        counts: int64 [N], how many of them there are.
        layers: of the model, each one's place in the pool.
        device: where the model runs.
        groups: as for `build`.
    """
    page_size = layers[0].keys.shape[1]
    pages, places = np.divmod(positions, page_size)
    lengths = starts + counts

    def cumulative(numbers: Integers) -> torch.Tensor:
        return on_device(device, np.concatenate([[0], np.cumsum(numbers)]).astype(np.int32))

    def placed(group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and block table of one group of layers."""
        tables = [sequence.tables[group] for sequence in step]
        ends = [table.end for table in tables]
        # As bytes, for a numpy array takes longer to fill row by row than all the rest of a step to lay out.
        page, width = np.dtype(np.int32).itemsize, max(ends)
        padded = (
            part
            for table, end in zip(tables, ends, strict=True)
            for part in (bytes(page * table.first), table.pages, bytes(page * (width - end)))
        )
        block_table = np.frombuffer(bytearray().join(padded), np.int32).reshape(len(tables), width)
        return on_device(device, block_table[rows, pages].astype(np.int64) * page_size + places), on_device(
            device, block_table
        )

    slots, block_table = placed(0)
    batch = PagedBatch(
        layers=layers,
        query_lengths=counts.tolist(),
        key_lengths=lengths.tolist(),
        slots=slots,
        block_table=block_table,
        cu_seq_q=cumulative(counts),
        cu_seq_k=cumulative(lengths),
        seqused_k=on_device(device, lengths.astype(np.int32)),
        window=groups[0].window if groups else None,
    )
    return batch if len(groups) <= 1 else _by_group(batch, groups, placed)


def _by_group(
    first: PagedBatch, groups: Sequence[LayerGroup], placed: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
) -> PagedBatch:
    """The first group's batch with those of all groups beside it."""
    others = [placed(group) for group in range(1, len(groups))]
    batches = [
        first,
        *(
            replace(first, slots=slots, block_table=block_table, window=group.window, _spans={})
            for group, (slots, block_table) in zip(groups[1:], others, strict=True)
        ),
    ]
    return replace(first, groups=batches, group_of=groups_of_layers(groups))


def groups_of_layers(groups: Sequence[LayerGroup]) -> list[int]:
    """Of each layer of the model, which of the groups it is in."""
    group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    return [group_of[layer] for layer in sorted(group_of)]


def on_device(device: torch.device, numbers: npt.NDArray[Any]) -> torch.Tensor:
    """The numbers on the device; copied while this thread goes on, where there is something to copy to."""
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
