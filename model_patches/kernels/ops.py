"""The C++ operators as Python calls them: typed, with their defaults.

Knows the operators' arguments. Does not know how they come to be there (`build.load` makes them known to torch), nor
which model calls them.
"""

from enum import IntEnum

import torch

from model_patches.pages import KeyValuePages, PagedTensor

_ROWS = (torch.float32, torch.bfloat16)
_KEPT = (torch.float32, torch.bfloat16, torch.int8)


class Level(IntEnum):
    """Instruction sets, each with all that the ones before it have."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


def are_loaded() -> bool:
    """Whether the operators are there in this process."""
    return hasattr(torch.ops.ropewalk, "paged_attention")


def supports(device: torch.device, dtype: torch.dtype, kept_as: torch.dtype) -> bool:
    """Whether the operators take these.

    Args:
        device: where the model runs.
        dtype: of queries, keys and values of a step.
        kept_as: of the keys and values in the pages.
    """
    return device.type == "cpu" and dtype in _ROWS and kept_as in _KEPT


def current_level() -> Level:
    """The instruction set in use: the best of this CPU below the limit."""
    return Level(torch.ops.ropewalk.current_level())


def limit_level(highest: Level) -> None:
    """Use nothing above a level from now on, in the whole process."""
    torch.ops.ropewalk.limit_level(int(highest))


def paged_attention(
    query: torch.Tensor,
    pages: KeyValuePages,
    cu_seq_q: torch.Tensor,
    key_lengths: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Causal attention of N sequences' latest T tokens in all over their pages, accumulated in float32.

    An online softmax over blocks of keys (FlashAttention, 2205.14135), split over cores within long sequences too
    (Flash-Decoding). A row's bits do not depend on what else is in the batch, nor on the number of threads.

    Args:
        query: float32 or bfloat16 [T, heads, key_dim], rotated; a head's dimensions must be adjacent.
        pages: float32, bfloat16 or int8; this step's keys and values are there already.
        cu_seq_q: int32 [N + 1], cumulative query lengths, from 0 to T.
        key_lengths: int32 [N], how many tokens of each sequence are cached, this step's included.
        block_table: int32 [N, max_pages], the pages of each sequence in order.
        scale: softmax scale, positive.
        window: how many of the latest tokens are seen, the token itself included; None for all.
        soft_cap: c of c · tanh(logit / c) (Gemma 2, 2408.00118); None for none.
        sinks: float32 [heads], a logit more in each softmax, whose share is lost (gpt-oss).
        slopes: float32 [heads], what is added to a logit for each position that a key is ahead of the query (ALiBi,
            2108.12409, has keys behind it only: positive slopes lower them). After the soft cap.
        deterministic: a row's bits do not depend either on how many tokens of its sequence are computed in one step.

    Returns:
        [T, heads, value_dim] of the query's type.

    Raises:
        RuntimeError: shapes or types do not fit each other.
    """
    attended: torch.Tensor = torch.ops.ropewalk.paged_attention(
        query,
        pages.keys.data,
        pages.keys.scales,
        pages.values.data,
        pages.values.scales,
        cu_seq_q,
        key_lengths,
        block_table,
        scale,
        window or 0,
        soft_cap or 0.0,
        sinks,
        slopes,
        deterministic,
    )
    return attended


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pages: KeyValuePages,
    *,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into their pages.

    The formula is R(θ·p) of RoFormer (2104.09864, 3.2.2), in float32, rounded once. The first 2 · pairs dimensions of a
    head are rotated, the others copied.

    Args:
        query: float32 or bfloat16 [T, heads, key_dim]; strided views of one joined product will do, as long as a
            head's dimensions are adjacent.
        key: [T, kv_heads, key_dim], likewise.
        value: [T, kv_heads, value_dim], likewise.
        cos: float32 [T, pairs], times the attention factor.
        sin: likewise.
        slots: int64 [T], page × page_size + offset in the page.
        pages: of the rows' type, or int8.
        interleaved: whether dimension 2i is rotated with 2i + 1, not i with i + pairs.
        out: takes the rotated queries, [T, heads, key_dim]; may be `query`. None for new memory.

    Returns:
        The rotated queries.

    Raises:
        RuntimeError: shapes or types do not fit each other.
    """
    rotated = torch.empty(query.shape, dtype=query.dtype) if out is None else out
    torch.ops.ropewalk.rotate_and_write(
        query,
        key,
        value,
        cos,
        sin,
        interleaved,
        slots,
        pages.keys.data,
        pages.keys.scales,
        pages.values.data,
        pages.values.scales,
        rotated,
    )
    return rotated


def choose(
    logits: torch.Tensor,
    sampled: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    draws: torch.Tensor,
) -> torch.Tensor:
    """A token for each row: the likeliest, the first of equals; or for sampled rows the one at which the cumulative
    probability of what the filters leave first exceeds draw × its total. Filters as in `service.engine.sampler`; no row
    is sorted.

    Args:
        logits: float32 [R, vocabulary].
        sampled: int64 [S], the rows that are sampled.
        temperature: float32 [S, 1], above 0.
        top_k: int64 [S, 1], 1 to the vocabulary's size.
        top_p: float32 [S, 1]; 1 keeps all.
        min_p: float32 [S, 1].
        draws: float64 [S, 1], uniform in [0, 1).

    Returns:
        int64 [R].

    Raises:
        RuntimeError: shapes or types do not fit each other.
    """
    tokens: torch.Tensor = torch.ops.ropewalk.choose(logits, sampled, temperature, top_k, top_p, min_p, draws)
    return tokens


def rerotate(
    keys: PagedTensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    offset: int = 0,
    interleaved: bool = False,
) -> None:
    """Rotate the keys of whole pages once more, in float32, rounded once.

    Args:
        keys: float32 or bfloat16.
        sources: int64 [n], the pages to read.
        targets: int64 [n], the pages to write; one that differs from its source is no source itself.
        cos: float32 [n, page_size, pairs].
        sin: likewise.
        offset: the first rotated dimension of a key; those that are not rotated are copied.
        interleaved: whether dimension 2i is rotated with 2i + 1, not i with i + pairs, counted from `offset`.

    Raises:
        RuntimeError: shapes or types do not fit each other, or a page is outside the pool.
    """
    torch.ops.ropewalk.rerotate(keys.data, sources, targets, cos, sin, offset, interleaved)
