"""Attention over a paged cache of rotated keys.

Knows pages and block tables. Does not know plans: keys arrive rotated, and what a page holds is for its owner to know.
One interface, `PagedBatch`, shaped like `torch.nn.attention.varlen.varlen_attn`; one implementation for CUDA, built on
that function, one for CPUs, built on the C++ operators where they are loaded, and one for any device, built on
scaled_dot_product_attention or, with soft caps or ALiBi, written out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from model_patches.errors import UnsupportedModelError
from model_patches.kernels import ops
from model_patches.pages import KeyValuePages, PagedTensor

PAGED_ATTENTION = "ropewalk_paged"
"""Name under which the attention function is registered with transformers."""
_STAND_IN = "ropewalk_stand_in"
_VARLEN_PAGE = 256  # FlashAttention 2 takes pages of multiples of this only
_ALIGNMENT = 8  # fused kernels take heads of multiples of this only
_WRITTEN_LOGITS = 2**26  # bounds what attention that is written out holds in float32: 256 MiB
# What transformers' attention modules pass that changes no result here: nothing drops out of a served model, tokens
# come with their slots and keys rotated, and no weights are given back.
_WITHOUT_EFFECT = frozenset({"dropout", "position_ids", "use_cache", "output_router_logits"})


@dataclass(frozen=True)
class PagedBatch:
    """N sequences with T query tokens in all, packed without padding: what attention needs to know of one step.

    Attributes:
        layers: the pool, one entry for each layer.
        query_lengths: how many tokens of each sequence this step computes; sums to T.
        key_lengths: how many tokens of each sequence are cached once this step's are written.
        slots: int64 [T], where each token's key and value go.
        block_table: int32 [N, max_pages], the pages of each sequence in order, padded with 0.
        cu_seq_q: int32 [N + 1], cumulative query lengths.
        cu_seq_k: int32 [N + 1], cumulative key lengths.
        seqused_k: int32 [N], the key lengths.
        window: how many of the latest tokens the layers that read this table see at most; None for all. Entries of the
            table for pages before the window of every query say nothing and are not read.
        groups: where layers differ in what pages they keep, the batch of each group of layers, this one among them:
            alike in all but slots, block table and window. Empty where all layers keep the same pages.
        group_of: of each layer, which of the groups it is in; empty likewise.
        lengths_are_bounds: whether the lists of lengths say only how long sequences can be: so it is in a step that is
            recorded, see `model_patches.recorded`. The tensors say how long they are.
    """

    layers: Sequence[KeyValuePages]
    query_lengths: Sequence[int]
    key_lengths: Sequence[int]
    slots: torch.Tensor
    block_table: torch.Tensor
    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    seqused_k: torch.Tensor
    window: int | None = None
    groups: Sequence["PagedBatch"] = ()
    group_of: Sequence[int] = ()
    lengths_are_bounds: bool = False
    _masks: dict[tuple[int, int, int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _spans: dict[int | None, list["Span"]] = field(default_factory=dict)

    def of_layer(self, layer: int) -> "PagedBatch":
        """The same step over the pages of one layer."""
        return self.groups[self.group_of[layer]] if self.groups else self

    def mask(self, query_length: int, key_length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """The causal mask of one sequence's last `query_length` tokens over its `key_length` cached ones.

        Returns:
            [query_length, key_length], 0 where attended and -inf elsewhere, to be added to the logits: of a mask of
            truth values, torch would make just that again in every layer. Made once for all layers of a step.
        """
        shape = (query_length, key_length, window, dtype)
        if shape not in self._masks:
            hidden = hidden_keys(query_length, key_length, window, self.slots.device)
            self._masks[shape] = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, -torch.inf
            )
        return self._masks[shape]

    def spans(self, window: int | None) -> list["Span"]:
        """Where each sequence's visible tokens are; made once for all layers of a step."""
        if window not in self._spans:
            page_size = self.layers[0].keys.shape[1]
            lengths = zip(self.query_lengths, self.key_lengths, strict=True)
            firsts = [0 if window is None else max(0, key - query - window + 1) for query, key in lengths]
            self._spans[window] = [
                Span(
                    pages=table[first // page_size : -(-length // page_size)],
                    first=first % page_size,
                    last=length - first // page_size * page_size,
                    skipped=first,
                )
                for table, first, length in zip(self.block_table, firsts, self.key_lengths, strict=True)
            ]
        return self._spans[window]


@dataclass(frozen=True)
class Span:
    """The part of one sequence that a step's tokens can see.

    Attributes:
        pages: int32, the pages that hold it, in order.
        first: the place of its first token, counted from the first of these pages.
        last: the place after its last token, counted likewise.
        skipped: how many tokens of the sequence come before it.
    """

    pages: torch.Tensor
    first: int
    last: int
    skipped: int

    def gather(self, pool: PagedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Its keys or values, [1, kv_heads, tokens, dim] in `dtype`."""
        return pool.gather(self.pages, dtype).flatten(0, 1)[self.first : self.last].transpose(0, 1)[None]


def hidden_keys(query_length: int, key_length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which keys the last `query_length` of `key_length` tokens do not see, bool [query_length, key_length]."""
    keys = torch.arange(key_length, device=device)
    queries = keys[key_length - query_length :, None]
    return keys > queries if window is None else (keys > queries) | (keys <= queries - window)


def uses_varlen(device: torch.device, dtype: torch.dtype, kept_as: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether attention can run through torch's FlashAttention: in half precision over pages of the same type, on CUDA
    devices and head sizes that it supports.

    Args:
        device: where the model runs.
        dtype: of the queries.
        kept_as: of the keys and values in the pages.
        key_dim: dimensions of a key.
        value_dim: dimensions of a value.
    """
    if device.type != "cuda" or dtype.itemsize != 2 or kept_as != dtype:
        return False
    if key_dim != value_dim or key_dim > 256 or key_dim % _ALIGNMENT:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def page_size_for(device: torch.device, dtype: torch.dtype, kept_as: torch.dtype, key_dim: int, value_dim: int) -> int:
    """Tokens in one page: what FlashAttention needs where it runs; elsewhere small pages waste less. Args as for
    `uses_varlen`."""
    return _VARLEN_PAGE if uses_varlen(device, dtype, kept_as, key_dim, value_dim) else 16


def register() -> None:
    """Make the attention function known to transformers under its own name; models that do not ask for it are
    untouched. No mask function is registered with it, so transformers builds no masks."""
    AttentionInterface.register(PAGED_ATTENTION, paged_attention_forward)


def paged_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_batch: PagedBatch,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Write this step's rotated keys and values into the layer's pages, then attend over the pages.

    Args:
        module: the attention module that calls; of it, `layer_idx`, `is_causal` and `sliding_window` are read.
        query: [1, heads, T, key_dim], rotated.
        key: [1, kv_heads, T, key_dim], rotated.
        value: [1, kv_heads, T, value_dim].
        attention_mask: must be None.
        paged_batch: the step, handed through the model's forward as a keyword argument.
        scaling: softmax scale.
        sliding_window: how many of the latest tokens are seen, the token itself included; None for what the module
            says, see `window_of`.
        s_aux: [heads], attention sinks (gpt-oss): a logit of each head that takes its share of every softmax and gives
            nothing for it.
        softcap: c of c · tanh(logit / c) (Gemma 2, 2408.00118); None for none.
        slopes: float32 [heads], what is taken off a logit for each token between key and query (ALiBi, 2108.12409);
            None for none.
        **others: what changes no result, or is None.

    Returns:
        [1, T, heads, value_dim] and None, as transformers expects.

    Raises:
        UnsupportedModelError: the module asks for something else, sees further than its pages reach, or is not causal.
    """
    assert attention_mask is None
    check_request(module, others)
    window = window_of(module, sliding_window)
    paged_batch = paged_batch.of_layer(module.layer_idx)
    check_window(module, window, paged_batch)
    pages = paged_batch.layers[module.layer_idx]
    pages.write(paged_batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    packed = query[0].transpose(0, 1)
    if softcap is None and slopes is None and _reads_by_varlen(query, value, pages):
        return attend_varlen(packed, pages, paged_batch, scaling, window, s_aux)[None], None
    if ops.supports(query.device, query.dtype, pages.keys.dtype) and ops.are_loaded():
        attend = attend_operator
    elif paged_batch.lengths_are_bounds:
        raise UnsupportedModelError(f"{type(module).__name__} attends one sequence at a time, which cannot be recorded")
    else:
        attend = attend_sdpa
    return attend(packed, pages, paged_batch, scaling, window, s_aux, softcap, slopes)[None], None


@contextmanager
def attending_by(model: Any, function: Callable[..., tuple[torch.Tensor, None]]) -> Iterator[None]:
    """Have a patched model attend by another function, of the same arguments, while the block runs.

    Args:
        model: of transformers, one that leaves attention to AttentionInterface.
        function: in place of `paged_attention_forward`.
    """
    AttentionInterface.register(_STAND_IN, function)
    model.set_attn_implementation(_STAND_IN)
    try:
        yield
    finally:
        model.set_attn_implementation(PAGED_ATTENTION)


def check_request(module: Any, others: Mapping[str, Any]) -> None:
    """Refuse what attention here cannot do.

    Args:
        module: the attention module that calls.
        others: keyword arguments that nobody has read.

    Raises:
        UnsupportedModelError: one of them would change results, or the module is not causal.
    """
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{type(module).__name__} sees tokens ahead, which paged attention does not")
    if unknown := [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, which paged attention does not have"
        )


def window_of(module: Any, sliding_window: int | None) -> int | None:
    """How many of the latest tokens an attention module sees, the token itself included; None for all.

    Args:
        module: one that leaves its window to the mask (Qwen2-MoE) has it as its `sliding_window` only.
        sliding_window: what it asks attention for.
    """
    return sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)


def check_window(module: Any, window: int | None, batch: PagedBatch) -> None:
    """Refuse to look for tokens whose pages may have been given back.

    Raises:
        UnsupportedModelError: the module sees further than the pages of its layer reach.
    """
    if batch.window is not None and (window is None or window > batch.window):
        raise UnsupportedModelError(
            f"{type(module).__name__} of layer {module.layer_idx} sees {window or 'all'} tokens, but its pages hold "
            f"the last {batch.window} only"
        )


def _reads_by_varlen(query: torch.Tensor, value: torch.Tensor, pages: KeyValuePages) -> bool:
    kept = pages.keys
    fused = uses_varlen(query.device, query.dtype, kept.dtype, query.shape[-1], value.shape[-1])
    return fused and kept.shape[1] % _VARLEN_PAGE == 0


def attend_sdpa(
    query: torch.Tensor,
    pages: KeyValuePages,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention one sequence at a time over its gathered pages: the reference, and the path for CPU, float32, pages of
    another type than the query's, soft caps and ALiBi.

    A sequence's result does not depend on what else is in the batch.

    Args:
        query: [T, heads, key_dim]; the rest as in `paged_attention_forward`.

    Returns:
        [T, heads, value_dim].
    """
    value_dim = pages.values.shape[-1]
    outputs = []
    segments = torch.split(query, list(batch.query_lengths))
    for segment, span, key_length in zip(segments, batch.spans(window), batch.key_lengths, strict=True):
        query_length = len(segment)
        key, value = (span.gather(pool, query.dtype) for pool in (pages.keys, pages.values))
        if soft_cap is not None or slopes is not None:
            visible = batch.mask(query_length, key_length, window, query.dtype)[:, span.skipped :]
            outputs.append(_attend_written(segment, key, value, visible, scale, soft_cap, sinks, slopes))
            continue
        mask = None
        if query_length > 1 and (query_length < key_length or window is not None or sinks is not None):
            mask = batch.mask(query_length, key_length, window, query.dtype)[:, span.skipped :]
        if sinks is not None:
            segment, key, value, mask = _with_sinks(sinks / scale, segment, key, value, mask)
        if value.shape[-1] < key.shape[-1]:  # fused kernels want both alike
            value = pad(value, (0, key.shape[-1] - value.shape[-1]))
        outputs.append(_attend_one(segment, key, value, mask, scale)[..., :value_dim])
    return torch.cat(outputs)


def _attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of one sequence, its tokens aligned at the end with the keys'.

    Args:
        query: [q, heads, dim].
        key: [1, kv_heads, k, dim].
        value: [1, kv_heads, k, value_dim].
        mask: [q, k], added to the logits; None where the only token sees all keys, or every token all up to itself.
        scale: softmax scale.

    Returns:
        [q, heads, value_dim].
    """
    length, heads, dim = query.shape
    kv_heads = key.shape[1]
    if length == 1:
        # The query heads that share a key head become rows of one product: over bf16 on a CPU this is 7 to 10
        # times faster than enable_gqa.
        folded = query.view(1, kv_heads, heads // kv_heads, dim)
        return scaled_dot_product_attention(folded, key, value, scale=scale).reshape(1, heads, -1)
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return attended[0].transpose(0, 1)


def _attend_written(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """The same with a soft cap on the logits or ALiBi, which scaled_dot_product_attention does not have: written out,
    logits and softmax in float32. Shapes as for `_attend_one`, the last three as for `paged_attention_forward`."""
    heads, kv_heads, keys = query.shape[1], key.shape[1], key.shape[2]
    keys_first, values = key[0, :, None].transpose(2, 3), value[0, :, None]
    places = torch.arange(keys, device=query.device)
    outputs = []
    at_a_time = max(1, _WRITTEN_LOGITS // (heads * keys))
    own_places = places[keys - len(query) :].split(at_a_time)
    for some, hidden, at in zip(query.split(at_a_time), mask.split(at_a_time), own_places, strict=True):
        folded = some.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, q, dim]
        logits = (folded @ keys_first).float() * scale
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if slopes is not None:
            logits += slopes.view(kv_heads, -1, 1, 1) * (places - at[:, None])
        logits = logits + hidden
        if sinks is not None:
            column = sinks.float().view(kv_heads, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, column], dim=-1)
        weights = logits.softmax(dim=-1)[..., :keys].to(values.dtype)
        outputs.append((weights @ values).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(outputs)


def _with_sinks(
    sinks: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sinks as one more key, in front, that all tokens see.

    In a dimension of its own it is 1, every other key 0, and the query of each head has its sink; its value is 0.
    Shapes as for `_attend_one`.

    Args:
        sinks: [heads], each divided by the softmax scale.
    """
    dim = query.shape[-1]
    query = pad(query, (0, _ALIGNMENT))
    query[..., dim] = sinks
    key = pad(key, (0, _ALIGNMENT, 1, 0))
    key[..., 0, dim] = 1
    return query, key, pad(value, (0, 0, 1, 0)), None if mask is None else pad(mask, (1, 0))


def attend_operator(
    query: torch.Tensor,
    pages: KeyValuePages,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same on a CPU, all sequences in one call of the C++ operator, which reads the pages in place.

    Where `ops.supports` says so and the operators are loaded. Args and return value as for `attend_sdpa`.
    """
    return ops.paged_attention(
        query,
        pages,
        batch.cu_seq_q,
        batch.seqused_k,
        batch.block_table,
        scale,
        window=window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.float(),
        slopes=slopes,
    )


def attend_varlen(
    query: torch.Tensor,
    pages: KeyValuePages,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same on CUDA, all sequences in one call of torch's FlashAttention over block tables.

    Where `uses_varlen` says so, over pages of a multiple of 256 tokens; it has no soft cap and no ALiBi. Args and
    return value as for `attend_sdpa`.
    """
    # Imported only here: it brings in torch's compiler, which takes more than a second.
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    attended, logsumexp = varlen_attn(
        query.contiguous(),
        pages.keys.data,
        pages.values.data,
        batch.cu_seq_q,
        batch.cu_seq_k,
        max(batch.query_lengths),
        max(batch.key_lengths),
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != pages.keys.shape[2],
        seqused_k=batch.seqused_k,
        block_table=batch.block_table,
        # With more splits FlashAttention 2 returns wrong rows over pages (pytorch issue 194167), and a row's bits
        # depend on what else is in the batch.
        num_splits=1,
    )
    if sinks is None:
        return attended
    # exp(lse) is the softmax's denominator without the sink: this multiplies by exp(lse) / (exp(lse) + exp(sink)).
    # Its shape is [heads, T], whatever varlen_attn's docstring says.
    assert logsumexp.shape == (query.shape[1], query.shape[0])
    return attended * torch.sigmoid(logsumexp.T - sinks)[..., None].to(attended.dtype)
