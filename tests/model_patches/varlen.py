"""`torch.nn.attention.varlen.varlen_attn` by its documentation, for CPU, by operators that ask nothing of the host."""

import torch
from torch.nn.attention.varlen import AuxRequest


def emulated_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal masks are aligned at the end. What lies beyond the lengths that were promised is not seen.

    Of the log-sum-exp, what it says of its shape is not true: [heads, T], as its own registration for tracing has it.
    """
    assert return_aux.lse
    assert window_size[1] == 0
    assert num_splits == 1
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert query.is_contiguous()
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    tokens = torch.arange(len(query))
    rows = torch.searchsorted(cu_seq_q[1:], tokens, right=True)
    used = torch.minimum(seqused_k[rows], cu_seq_k.diff()[rows]).clamp(max=max_k)
    before_the_end = cu_seq_q[1:][rows] - tokens  # 1 for the last token of its sequence
    group = query.shape[1] // key.shape[2]
    keys, values = (
        pool.index_select(0, block_table[rows].flatten()).unflatten(0, (len(query), -1)).flatten(1, 2)
        for pool in (key, value)
    )
    distance = (used - before_the_end)[:, None] - torch.arange(keys.shape[1])
    hidden = (distance < 0) | (before_the_end > max_q)[:, None]
    if window_size[0] >= 0:
        hidden |= distance > window_size[0]
    logits = scale * torch.einsum("qhd,qkhd->qhk", query, keys.repeat_interleave(group, dim=2))
    logits = logits.masked_fill(hidden[:, None], -torch.inf)
    attended = torch.einsum("qhk,qkhd->qhd", logits.softmax(dim=-1), values.repeat_interleave(group, dim=2))
    return attended, logits.logsumexp(dim=-1).T
