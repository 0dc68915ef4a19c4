"""Tensors for one step. Knows sequences and the layout of the pool; does not run a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence

from model_patches.attention import PagedBatch
from model_patches.pages import KeyValuePages
from model_patches.plan import PositionPlan
from service import core


@dataclass(frozen=True)
class StepTensors:
    """What `PatchedModel.forward` takes; the fields are its arguments, in its order."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    plan_rows: torch.Tensor
    logits_at: torch.Tensor
    batch: PagedBatch


def build(
    step: Mapping[core.Sequence, int],
    layers: Sequence[KeyValuePages],
    plan_row: Callable[[PositionPlan], int],
    device: torch.device,
) -> StepTensors:
    """Lay out a step.

    Args:
        step: how many tokens of each sequence to compute; their pages are allocated.
        layers: the pool.
        plan_row: the number of a plan for the model.
        device: where the model runs.

    Returns:
        T = the sum of the step's tokens. Logits are asked for the last token of each sequence that has no uncomputed
        token left after the step, in the step's order.
    """
    spans = [(sequence, sequence.num_computed, sequence.num_computed + tokens) for sequence, tokens in step.items()]
    stops = accumulate(step.values())
    last = [stop - 1 for (sequence, _, end), stop in zip(spans, stops, strict=True) if end == sequence.num_tokens]
    positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
    rows = torch.arange(len(step)).repeat_interleave(torch.tensor(list(step.values())))
    token_ids = [token for sequence, start, end in spans for token in sequence.tokens(start, end)]
    plan_rows = torch.tensor([plan_row(sequence.plan) for sequence in step])[rows]
    return StepTensors(
        token_ids=torch.tensor(token_ids).to(device, non_blocking=True),
        positions=positions.to(device, non_blocking=True),
        plan_rows=plan_rows.to(device, non_blocking=True),
        logits_at=torch.tensor(last, dtype=torch.int64).to(device, non_blocking=True),
        batch=_page(spans, positions, rows, layers, device),
    )


def _page(
    spans: Sequence[tuple[core.Sequence, int, int]],
    positions: torch.Tensor,
    rows: torch.Tensor,
    layers: Sequence[KeyValuePages],
    device: torch.device,
) -> PagedBatch:
    """Find every token's place in the pool.

    Args:
        spans: each sequence with the first of its tokens in this step and the one after the last.
        positions: int64 [T].
        rows: int64 [T], which of the spans a token is of.
        layers: the pool.
        device: where the model runs.
    """
    page_size = layers[0].keys.shape[1]
    query_lengths = [end - start for _, start, end in spans]
    key_lengths = [end for _, _, end in spans]
    block_table = pad_sequence([torch.tensor(s.pages, dtype=torch.int32) for s, _, _ in spans], batch_first=True)
    slots = block_table[rows, positions // page_size].to(torch.int64) * page_size + positions % page_size

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    return PagedBatch(
        layers=layers,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        slots=slots.to(device, non_blocking=True),
        block_table=block_table.to(device, non_blocking=True),
        cu_seq_q=int32([0, *accumulate(query_lengths)]),
        cu_seq_k=int32([0, *accumulate(key_lengths)]),
        seqused_k=int32(key_lengths),
    )
