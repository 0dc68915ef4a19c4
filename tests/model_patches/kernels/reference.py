"""Attention and rotation by their definitions, in float64 on gathered rows."""

import torch

from tests.model_patches.paged import RandomBatch


def attention_by_definition(
    given: RandomBatch,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(logits) · v for each token and head over what it may see, float64 [T, heads, value_dim].

    Args:
        given: the batch.
        scale: softmax scale.
        window: how many of the latest tokens are seen; None for all.
        soft_cap: c of c · tanh(logit / c).
        sinks: [heads], a logit more in each softmax.
        slopes: [heads], times the key's position less the query's, added to the logit.
    """
    outputs = []
    queries = given.query.double().split(list(given.batch.query_lengths))
    for query, key, value in zip(queries, given.keys, given.values, strict=True):
        group = query.shape[1] // key.shape[1]
        logits = scale * torch.einsum("qhd,khd->hqk", query, key.double().repeat_interleave(group, dim=1))
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        ahead = torch.arange(len(key)) - torch.arange(len(key) - len(query), len(key))[:, None]
        if slopes is not None:
            logits = logits + slopes.double()[:, None, None] * ahead
        hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
        logits = logits.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            lost = sinks.double()[:, None, None].expand(-1, len(query), 1)
            logits = torch.cat([logits, lost], dim=-1)
        weights = logits.softmax(dim=-1)[..., : len(key)]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value.double().repeat_interleave(group, dim=1)))
    return torch.cat(outputs)


def rotated_by_definition(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair as a complex number, times cos + i·sin, float64 [T, heads, dim].

    Args:
        rows: [T, heads, dim].
        cos: [T, pairs].
        sin: [T, pairs].
        interleaved: whether pairs are neighbours, not halves of the rotated part.
    """
    pairs = cos.shape[-1]
    rows = rows.double().clone()
    part = rows[..., : 2 * pairs]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[:, None]
    both = [turned.real, turned.imag]
    rows[..., : 2 * pairs] = torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
    return rows
