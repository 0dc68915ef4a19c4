"""Tensors for one step. Knows sequences and the layout of the pool; does not run a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

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
    ends = [(sequence.num_computed, sequence.num_computed + tokens) for sequence, tokens in step.items()]
    cu_seq_q = [0, *accumulate(step.values())]
    key_lengths = [end for _, end in ends]
    max_pages = max(len(sequence.pages) for sequence in step)

    def tensor(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    positions = tensor(list(chain.from_iterable(range(start, end) for start, end in ends)))
    query_lengths = tensor(list(step.values()))
    padded_pages = [sequence.pages + [0] * (max_pages - len(sequence.pages)) for sequence in step]
    block_table = torch.tensor(padded_pages, dtype=torch.int32, device=device)
    rows = torch.arange(len(step), device=device).repeat_interleave(query_lengths)
    pages = block_table[rows, positions // page_size].to(torch.int64)
    return StepTensors(
        token_ids=tensor(
            list(chain.from_iterable(s.tokens(start, end) for s, (start, end) in zip(step, ends, strict=True)))
        ),
        positions=positions,
        plan_rows=tensor([plan_row(sequence.choice.plan) for sequence in step])[rows],
        logits_at=tensor(
            [
                last - 1
                for sequence, end, last in zip(step, key_lengths, cu_seq_q[1:], strict=True)
                if end == sequence.num_tokens
            ]
        ),
        batch=PagedBatch(
            layers=layers,
            query_lengths=list(step.values()),
            key_lengths=key_lengths,
            slots=pages * page_size + positions % page_size,
            block_table=block_table,
            cu_seq_q=tensor(cu_seq_q, torch.int32),
            cu_seq_k=tensor([0, *accumulate(key_lengths)], torch.int32),
            seqused_k=tensor(key_lengths, torch.int32),
        ),
    )
