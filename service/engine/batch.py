"""Tensors for one step. Knows sequences and the layout of the pool; does not run a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence

from model_patches.attention import KeyValuePages, PagedBatch
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
    page_size = layers[0].keys.shape[1]
    starts = [sequence.num_computed for sequence in step]
    query_lengths = list(step.values())
    key_lengths = [start + tokens for start, tokens in zip(starts, query_lengths, strict=True)]
    cu_seq_q = [0, *accumulate(query_lengths)]
    spans = [(sequence, start, end) for sequence, start, end in zip(step, starts, key_lengths, strict=True)]
    last = [
        stop - 1 for (sequence, _, end), stop in zip(spans, cu_seq_q[1:], strict=True) if end == sequence.num_tokens
    ]

    positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
    rows = torch.arange(len(step)).repeat_interleave(torch.tensor(query_lengths))
    block_table = pad_sequence([torch.tensor(s.pages, dtype=torch.int32) for s in step], batch_first=True)
    slots = block_table[rows, positions // page_size].to(torch.int64) * page_size + positions % page_size

    def on_device(values: torch.Tensor) -> torch.Tensor:
        return values.to(device, non_blocking=True)

    def int32(values: list[int]) -> torch.Tensor:
        return on_device(torch.tensor(values, dtype=torch.int32))

    return StepTensors(
        token_ids=on_device(torch.tensor([token for s, start, end in spans for token in s.tokens(start, end)])),
        positions=on_device(positions),
        plan_rows=on_device(torch.tensor([plan_row(sequence.choice.plan) for sequence in step])[rows]),
        logits_at=on_device(torch.tensor(last, dtype=torch.int64)),
        batch=PagedBatch(
            layers=layers,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            slots=on_device(slots),
            block_table=on_device(block_table),
            cu_seq_q=int32(cu_seq_q),
            cu_seq_k=int32([0, *accumulate(key_lengths)]),
            seqused_k=int32(key_lengths),
        ),
    )
