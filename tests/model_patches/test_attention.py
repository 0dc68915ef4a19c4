"""Paged attention against its definition in float64."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen

from model_patches import attention
from model_patches.attention import attend_sdpa, attend_varlen, page_size_for, paged_attention_forward
from model_patches.errors import UnsupportedModelError
from model_patches.kernels import ops
from tests.model_patches.kernels import reference
from tests.model_patches.paged import RandomBatch, attention_by_definition, forget_what_is_behind, random_batch
from tests.model_patches.varlen import emulated_varlen_attn

SCALE = 0.3
MODULE = SimpleNamespace(layer_idx=0)
LENGTHS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 14)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=5
)
HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (12, 1)])
WINDOWS = st.sampled_from([None, 1, 3, 8, 100])


@pytest.fixture(autouse=True, scope="module")
def torch_alone() -> Iterator[None]:
    """The C++ operators have tests of their own; here what runs without them is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "are_loaded", lambda: False)
        yield


def run(given_batch: RandomBatch, window: int | None, module: Any = MODULE, **extra: Any) -> torch.Tensor:
    """The registered attention function, called as transformers calls it."""
    output, weights = paged_attention_forward(
        module,
        given_batch.query.transpose(0, 1)[None],
        given_batch.key.transpose(0, 1)[None],
        given_batch.value.transpose(0, 1)[None],
        None,
        paged_batch=given_batch.batch,
        scaling=SCALE,
        sliding_window=window,
        **extra,
    )
    assert weights is None
    return output[0]


@settings(deadline=None, max_examples=80)
@given(LENGTHS, HEADS, WINDOWS, st.integers(0, 10))
def test_mixed_prefills_chunks_and_decodes_attend_over_their_own_pages_only(
    lengths: list[tuple[int, int]], heads: tuple[int, int], window: int | None, seed: int
) -> None:
    batch = random_batch(lengths, heads=heads[0], kv_heads=heads[1], seed=seed)
    expected = attention_by_definition(batch, SCALE, window)
    torch.testing.assert_close(run(batch, window).double(), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, HEADS, WINDOWS, st.sampled_from([2, 8, 12]), st.integers(0, 10))
def test_sinks_take_their_share_of_every_softmax_also_where_values_are_of_another_size_than_keys(
    lengths: list[tuple[int, int]], heads: tuple[int, int], window: int | None, value_dim: int, seed: int
) -> None:
    batch = random_batch(lengths, heads=heads[0], kv_heads=heads[1], value_dim=value_dim, seed=seed)
    expected = attention_by_definition(batch, SCALE, window)
    torch.testing.assert_close(run(batch, window).double(), expected, rtol=1e-5, atol=1e-5)
    sinks = 2 * torch.randn(heads[0], generator=torch.Generator().manual_seed(seed))
    expected = attention_by_definition(batch, SCALE, window, sinks)
    torch.testing.assert_close(run(batch, window, s_aux=sinks).double(), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, HEADS, WINDOWS, st.sampled_from([2, 8, 12]), st.booleans(), st.integers(0, 10))
def test_a_soft_cap_bends_logits_but_not_sinks(
    lengths: list[tuple[int, int]], heads: tuple[int, int], window: int | None, value_dim: int, sunk: bool, seed: int
) -> None:
    batch = random_batch(lengths, heads=heads[0], kv_heads=heads[1], value_dim=value_dim, seed=seed)
    sinks = 2 * torch.randn(heads[0], generator=torch.Generator().manual_seed(seed)) if sunk else None
    expected = attention_by_definition(batch, SCALE, window, sinks, soft_cap=0.7)
    torch.testing.assert_close(run(batch, window, s_aux=sinks, softcap=0.7).double(), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, HEADS, WINDOWS, st.sampled_from([None, 0.7]), st.booleans(), st.integers(0, 10))
def test_slopes_lower_logits_by_distance(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int | None,
    soft_cap: float | None,
    sunk: bool,
    seed: int,
) -> None:
    batch = random_batch(lengths, heads=heads[0], kv_heads=heads[1], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    sinks = 2 * torch.randn(heads[0], generator=generator) if sunk else None
    slopes = torch.rand(heads[0], generator=generator)
    expected = reference.attention_by_definition(
        batch, SCALE, window=window, soft_cap=soft_cap, sinks=sinks, slopes=slopes
    )
    output = run(batch, window, s_aux=sinks, softcap=soft_cap, slopes=slopes)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_long_prompts_are_attended_to_in_parts_where_attention_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_WRITTEN_LOGITS", 4 * 20 * 3)  # three queries at a time
    batch = random_batch([(11, 20), (20, 20)], heads=4, kv_heads=2)
    expected = attention_by_definition(batch, SCALE, 6, soft_cap=0.7)
    torch.testing.assert_close(run(batch, 6, softcap=0.7).double(), expected, rtol=1e-5, atol=1e-5)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.7])
    expected = reference.attention_by_definition(batch, SCALE, slopes=slopes)
    torch.testing.assert_close(run(batch, None, slopes=slopes).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["head_mask", "position_bias", "is_causal"])
def test_what_attention_does_not_know_is_refused_by_name(name: str) -> None:
    batch = random_batch([(1, 3)], heads=2, kv_heads=1)
    with pytest.raises(UnsupportedModelError, match=f"SimpleNamespace asks attention for {name}"):
        run(batch, None, **{name: torch.ones(1)})
    run(batch, None, **{name: None}, dropout=0.0)


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_pages_before_the_window_are_not_read(window: int, soft_cap: float | None) -> None:
    batch = random_batch([(1, 23), (5, 30), (2, 9)], heads=4, kv_heads=2)
    expected = attention_by_definition(batch, SCALE, window, soft_cap=soft_cap)
    forget_what_is_behind(batch, window)
    torch.testing.assert_close(run(batch, window, softcap=soft_cap).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_layer_that_sees_further_than_its_pages_reach_is_refused() -> None:
    batch = random_batch([(1, 9)], heads=2, kv_heads=1)
    batch = replace(batch, batch=replace(batch.batch, window=4))
    run(batch, 4)
    with pytest.raises(UnsupportedModelError, match="of layer 0 sees 5 tokens, but its pages hold the last 4 only"):
        run(batch, 5)
    with pytest.raises(UnsupportedModelError, match="sees all tokens"):
        run(batch, None)


def test_a_module_that_sees_tokens_ahead_is_refused() -> None:
    batch = random_batch([(1, 3)], heads=2, kv_heads=1)
    with pytest.raises(UnsupportedModelError, match="SimpleNamespace sees tokens ahead"):
        run(batch, None, module=SimpleNamespace(layer_idx=0, is_causal=False))


def test_a_window_that_a_module_leaves_to_the_mask_holds() -> None:
    batch = random_batch([(5, 12)], heads=2, kv_heads=1)
    told, untold = (SimpleNamespace(layer_idx=0, sliding_window=window) for window in (4, None))
    expected = attention_by_definition(batch, SCALE, 4)
    torch.testing.assert_close(run(batch, None, module=told).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(batch, 4, module=untold).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kept_as", [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_pages_of_a_smaller_type_are_attended_over_as_the_numbers_that_they_stand_for(
    kept_as: torch.dtype, window: int | None
) -> None:
    lengths = [(3, 10), (1, 7), (6, 6), (1, 1)]
    batch = random_batch(lengths, heads=6, kv_heads=2, value_dim=5, kept_as=kept_as)
    assert batch.batch.layers[0].keys.dtype == kept_as
    output = run(batch, window)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), attention_by_definition(batch, SCALE, window), rtol=1e-5, atol=1e-5)


def test_a_sequence_attends_bit_for_bit_alike_alone_and_in_any_batch() -> None:
    lengths = [(1, 13), (6, 6), (4, 21), (1, 1)]
    batch = random_batch(lengths, heads=6, kv_heads=2, dtype=torch.bfloat16)
    together = run(batch, None).split([query for query, _ in lengths])
    bounds = pairwise(batch.batch.cu_seq_q.tolist())
    for row, (start, stop) in enumerate(bounds):
        alone = attention.PagedBatch(
            layers=batch.batch.layers,
            query_lengths=batch.batch.query_lengths[row : row + 1],
            key_lengths=batch.batch.key_lengths[row : row + 1],
            slots=batch.batch.slots[start:stop],
            block_table=batch.batch.block_table[row : row + 1],
            cu_seq_q=torch.tensor([0, stop - start]),
            cu_seq_k=torch.tensor([0, lengths[row][1]]),
            seqused_k=batch.batch.seqused_k[row : row + 1],
        )
        assert torch.equal(attend_sdpa(batch.query[start:stop], alone.layers[0], alone, SCALE, None), together[row])


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, -1.0, 2.0, 0.5, 3.0, -0.5])])
def test_the_call_of_varlen_attn_means_the_same_attention(
    monkeypatch: pytest.MonkeyPatch, window: int | None, heads: tuple[int, int], sinks: torch.Tensor | None
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", emulated_varlen_attn)
    batch = random_batch([(5, 5), (1, 12), (3, 17)], heads=heads[0], kv_heads=heads[1])
    if sinks is not None:
        sinks = sinks[: heads[0]]
    pages = batch.batch.layers[0]
    pages.write(batch.batch.slots, batch.key, batch.value)
    for pool in (pages.keys, pages.values):
        pool.data.nan_to_num_()  # as `allocate_pool` makes them on CUDA
    output = attend_varlen(batch.query, pages, batch.batch, SCALE, window, sinks)
    expected = attention_by_definition(batch, SCALE, window, sinks)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "kept_as", "dims", "capability", "expected"),
    [
        ("cpu", HALF, HALF, (64, 64), (0, 0), 16),
        ("cuda", HALF, HALF, (64, 64), (9, 0), 256),
        ("cuda", torch.float16, torch.float16, (128, 128), (8, 0), 256),
        ("cuda", torch.float32, torch.float32, (64, 64), (9, 0), 16),
        ("cuda", torch.float16, torch.float16, (64, 64), (7, 5), 16),
        ("cuda", HALF, HALF, (512, 512), (9, 0), 16),
        ("cuda", HALF, HALF, (20, 20), (9, 0), 16),
        ("cuda", HALF, HALF, (192, 128), (9, 0), 16),
        ("cuda", HALF, torch.int8, (64, 64), (9, 0), 16),
        ("cuda", HALF, torch.float8_e4m3fn, (64, 64), (9, 0), 16),
        ("cuda", HALF, torch.float16, (64, 64), (9, 0), 16),
    ],
)
def test_pages_are_as_large_as_the_kernel_that_runs_needs(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    kept_as: torch.dtype,
    dims: tuple[int, int],
    capability: tuple[int, int],
    expected: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert page_size_for(torch.device(device), dtype, kept_as, *dims) == expected


@pytest.mark.parametrize(("fused", "page_size", "varlen"), [(True, 256, True), (True, 16, False), (False, 256, False)])
def test_the_kernel_runs_only_over_pages_that_it_can_read(
    monkeypatch: pytest.MonkeyPatch, fused: bool, page_size: int, varlen: bool
) -> None:
    batch = random_batch([(1, 3)], heads=2, kv_heads=1, value_dim=4, page_size=page_size, kept_as=torch.int8)
    asked: list[tuple[Any, ...]] = []

    def answer(*given: Any) -> bool:
        asked.append(given)
        return fused

    monkeypatch.setattr(attention, "uses_varlen", answer)
    for name in ("attend_varlen", "attend_sdpa"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: torch.full((1,), float(name == "attend_varlen")))
    assert bool(run(batch, None)) == varlen
    assert not run(batch, None, slopes=torch.ones(2))
    assert asked == [(torch.device("cpu"), torch.float32, torch.int8, 8, 4)]
    assert not bool(run(batch, None, softcap=30.0))


def test_transformers_builds_no_mask_for_the_registered_function() -> None:
    seen: list[Any] = []

    def record(*_: Any, attention_mask: Any, **__: Any) -> None:
        seen.append(attention_mask)
        raise InterruptedError

    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    attention.register()
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(attention.PAGED_ATTENTION)
    original = AttentionInterface()[attention.PAGED_ATTENTION]
    AttentionInterface.register(
        attention.PAGED_ATTENTION, lambda *args, **kwargs: record(attention_mask=args[4], **kwargs)
    )
    try:
        with pytest.raises(InterruptedError):
            model(torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    finally:
        AttentionInterface.register(attention.PAGED_ATTENTION, original)
    assert seen == [None]
