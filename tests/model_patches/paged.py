"""Random paged batches, and attention over them by its definition in float64."""

from dataclasses import dataclass
from itertools import accumulate

import torch

from model_patches.attention import PagedBatch
from model_patches.pages import KeyValuePages, PagedTensor


@dataclass(frozen=True)
class RandomBatch:
    """A batch whose earlier keys and values are in the pages already, and its queries, keys and values of this step.

    Attributes:
        batch: the pages hold NaN wherever no token was written.
        query: [T, heads, head_dim].
        key: [T, kv_heads, head_dim].
        value: [T, kv_heads, value_dim].
        keys: of each sequence, all of them in order, [key_length, kv_heads, head_dim].
        values: likewise, [key_length, kv_heads, value_dim].
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
    value_dim: int | None = None,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    kept_as: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> RandomBatch:
    """Make a batch.

    Args:
        lengths: (query tokens, key tokens) of each sequence; the query's tokens are the last of the key's.
        heads: of the queries.
        kv_heads: of keys and values.
        head_dim: of queries and keys.
        value_dim: of values; head_dim where it is None.
        page_size: tokens in a page.
        dtype: of queries, keys and values.
        kept_as: type of the pages, `dtype` where it is None; keys and values are numbers that it has.
        device: where all of them are.
        seed: of everything random.
    """
    kept_as = kept_as or dtype
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    counts = [-(-key // page_size) for _, key in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    dims = (head_dim, head_dim if value_dim is None else value_dim)
    pages = KeyValuePages(*(_nan_pages((len(order), page_size, kv_heads, dim), kept_as, device) for dim in dims))
    keys, values = ([_as_kept(normal(length, kv_heads, dim), kept_as) for _, length in lengths] for dim in dims)
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


def forget_what_is_behind(given: RandomBatch, window: int) -> None:
    """Let the block table name, for pages before the window of a sequence's every query, one that holds NaN."""
    page_size = given.batch.layers[0].keys.shape[1]
    table = given.batch.block_table
    [unused, *_] = set(range(given.batch.layers[0].keys.shape[0])) - set(table.flatten().tolist())
    for row, query, key in zip(table, given.batch.query_lengths, given.batch.key_lengths, strict=True):
        row[: max(0, key - query - window + 1) // page_size] = unused


def _nan_pages(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> PagedTensor:
    pages = PagedTensor.allocate(shape, dtype, torch.device(device))
    pages.store(torch.arange(shape[0], device=device), torch.full(shape, torch.nan, device=device))
    return pages


def _as_kept(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [n, kv_heads, dim] as they come back from pages of a type."""
    pages = PagedTensor.allocate((1, *rows.shape), dtype, rows.device)
    pages.store(torch.tensor([0], device=rows.device), rows[None].float())
    return pages.gather(torch.tensor([0], device=rows.device), rows.dtype)[0]


def attention_by_definition(
    given: RandomBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """softmax(scale · q·k) · v for each token and head over what it may see, float64 [T, heads, value_dim].

    Args:
        given: the batch.
        scale: softmax scale.
        window: how many of the latest tokens are seen; None for all.
        sinks: [heads], a logit more in each softmax, whose share is lost; None for no such logit.
        soft_cap: c of c · tanh(logit / c), for all logits but the sinks; None for none.
    """
    rows = []
    queries = given.query.double().cpu().split(list(given.batch.query_lengths))
    for query, key, value in zip(queries, given.keys, given.values, strict=True):
        group = query.shape[1] // key.shape[1]
        for place, token in enumerate(query, start=len(key) - len(query)):
            first = 0 if window is None else max(0, place - window + 1)
            seen = slice(first, place + 1)
            for head, vector in enumerate(token):
                logits = scale * key[seen, head // group].double().cpu() @ vector
                if soft_cap is not None:
                    logits = soft_cap * torch.tanh(logits / soft_cap)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head : head + 1].double().cpu()])
                weights = logits.softmax(dim=0)[: place + 1 - first]
                rows.append(weights @ value[seen, head // group].double().cpu())
    return torch.stack(rows).view(*given.query.shape[:2], -1)
