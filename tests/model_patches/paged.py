"""Random paged batches, and attention over them by its definition in float64."""

from dataclasses import dataclass
from itertools import accumulate

import torch

from model_patches.attention import KeyValuePages, PagedBatch


@dataclass(frozen=True)
class RandomBatch:
    """A batch whose earlier keys and values are in the pages already, and its queries, keys and values of this step.

    Attributes:
        batch: the pages hold NaN wherever no token was written.
        query: [T, heads, head_dim].
        key: [T, kv_heads, head_dim].
        value: as key.
        keys: of each sequence, all of them in order, [key_length, kv_heads, head_dim].
        values: as keys.
    """

    batch: PagedBatch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def random_batch(
    lengths: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int = 8,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> RandomBatch:
    """Make a batch.

    Args:
        lengths: (query tokens, key tokens) of each sequence; the query's tokens are the last of the key's.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    counts = [-(-key // page_size) for _, key in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    shape = (len(order), page_size, kv_heads, head_dim)
    pages = KeyValuePages(*(torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)))
    keys = [normal(length, kv_heads, head_dim) for _, length in lengths]
    values = [normal(length, kv_heads, head_dim) for _, length in lengths]
    tables, slots = [], []
    for (query, length), count, key, value in zip(lengths, counts, keys, values, strict=True):
        table, order = order[:count], order[count:]
        place = torch.tensor([table[i // page_size] * page_size + i % page_size for i in range(length)], device=device)
        past = length - query
        pages.write(place[:past], key[:past], value[:past])
        tables.append(table + [0] * (max(counts) - count))
        slots.append(place[past:])

    def int32(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    batch = PagedBatch(
        layers=[pages],
        query_lengths=[query for query, _ in lengths],
        key_lengths=[key for _, key in lengths],
        slots=torch.cat(slots),
        block_table=torch.tensor(tables, dtype=torch.int32, device=device),
        cu_seq_q=int32([0, *accumulate(query for query, _ in lengths)]),
        cu_seq_k=int32([0, *accumulate(key for _, key in lengths)]),
        seqused_k=int32([key for _, key in lengths]),
    )
    return RandomBatch(
        batch,
        normal(sum(query for query, _ in lengths), heads, head_dim),
        torch.cat([key[len(key) - query :] for key, (query, _) in zip(keys, lengths, strict=True)]),
        torch.cat([value[len(value) - query :] for value, (query, _) in zip(values, lengths, strict=True)]),
        keys,
        values,
    )


def attention_by_definition(given: RandomBatch, scale: float, window: int | None) -> torch.Tensor:
    """softmax(scale · q·k) · v for each token and head over what it may see, float64 [T, heads, head_dim]."""
    rows = []
    queries = given.query.double().cpu().split(list(given.batch.query_lengths))
    for query, key, value in zip(queries, given.keys, given.values, strict=True):
        group = query.shape[1] // key.shape[1]
        for place, token in enumerate(query, start=len(key) - len(query)):
            first = 0 if window is None else max(0, place - window + 1)
            seen = slice(first, place + 1)
            for head, vector in enumerate(token):
                weights = (scale * key[seen, head // group].double().cpu() @ vector).softmax(dim=0)
                rows.append(weights @ value[seen, head // group].double().cpu())
    return torch.stack(rows).view(given.query.shape)
