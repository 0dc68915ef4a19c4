"""The attention operator against its definition in float64, at every instruction set of this CPU."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_patches.attention import attend_sdpa
from model_patches.kernels import ops
from model_patches.kernels.ops import Level
from model_patches.pages import KeyValuePages
from tests.model_patches.kernels.reference import attention_by_definition
from tests.model_patches.paged import RandomBatch, forget_what_is_behind, random_batch

pytestmark = pytest.mark.usefixtures("operators")

SCALE = 0.3
SHORT = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 40)).map(lambda pair: (pair[0], sum(pair) - min(pair[0], 1))),
    min_size=1,
    max_size=5,
)
HEADS = st.tuples(st.integers(1, 12), st.integers(1, 3)).map(lambda pair: (pair[0] * pair[1], pair[1]))
DIMS = st.sampled_from([(8, 8), (64, 64), (5, 7), (80, 24), (96, 128), (33, 16), (128, 128)])
WINDOWS = st.sampled_from([None, 1, 3, 17, 100])
KEPT = st.sampled_from([None, torch.int8, torch.float32, torch.bfloat16])
RUNS = st.fixed_dictionaries(
    {"threads": st.integers(1, 2), "level": st.sampled_from(list(Level)), "deterministic": st.booleans()}
)
LONG = [(1, 1537), (1, 512), (2, 513), (3, 1030), (45, 1040), (130, 130), (85, 725), (1, 3), (0, 600)]
"""Of several blocks of keys, to and beyond their ends, and of several blocks of queries; under a window of 130, the
last tokens of (85, 725) see nothing of a block that its first ones do."""


def attend(batch: RandomBatch, *, threads: int = 1, level: Level = Level.AMX, **extra: Any) -> torch.Tensor:
    """The operator on a batch whose latest keys and values are written to their pages first."""
    pages = batch.batch.layers[0]
    pages.write(batch.batch.slots, batch.key, batch.value)
    ops.limit_level(level)
    step = batch.batch
    torch.set_num_threads(threads)
    output = ops.paged_attention(batch.query, pages, step.cu_seq_q, step.seqused_k, step.block_table, SCALE, **extra)
    torch.set_num_threads(1)
    return output


def assert_close(output: torch.Tensor, expected: torch.Tensor, kept_as: torch.dtype | None = None) -> None:
    """As close as the type allows: bfloat16 rounds weights and the result, each to 2⁻⁹ of its size, and where large
    products are in bfloat16, what int8 stands for too."""
    tolerance = 2e-5 if output.dtype == torch.float32 else 3e-2 if kept_as == torch.int8 else 6e-3
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=100)
@given(SHORT, HEADS, DIMS, WINDOWS, st.sampled_from([1, 4, 16]), KEPT, RUNS, st.integers(0, 9))
def test_float32_attends_as_defined(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    page_size: int,
    kept_as: torch.dtype | None,
    run: dict[str, Any],
    seed: int,
) -> None:
    batch = random_batch(
        lengths,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=dims[0],
        value_dim=dims[1],
        page_size=page_size,
        kept_as=kept_as,
        seed=seed,
    )
    assert_close(attend(batch, window=window, **run), attention_by_definition(batch, SCALE, window=window))


@settings(deadline=None, max_examples=100)
@given(SHORT, HEADS, DIMS, WINDOWS, KEPT, RUNS, st.integers(0, 9))
def test_bfloat16_attends_as_defined(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    kept_as: torch.dtype | None,
    run: dict[str, Any],
    seed: int,
) -> None:
    batch = random_batch(
        lengths,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=dims[0],
        value_dim=dims[1],
        dtype=torch.bfloat16,
        kept_as=kept_as,
        seed=seed,
    )
    expected = attention_by_definition(batch, SCALE, window=window)
    assert_close(attend(batch, window=window, **run), expected, kept_as)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", list(Level))
def test_sequences_of_many_blocks_attend_as_defined(level: Level, dtype: torch.dtype, deterministic: bool) -> None:
    batch = random_batch(LONG, heads=6, kv_heads=2, head_dim=64, page_size=16, dtype=dtype)
    for window in (None, 130, 600):
        expected = attention_by_definition(batch, SCALE, window=window)
        for threads in (1, 2):
            output = attend(batch, window=window, level=level, threads=threads, deterministic=deterministic)
            assert_close(output, expected)


@settings(deadline=None, max_examples=80)
@given(
    SHORT,
    WINDOWS,
    st.sampled_from([None, 0.5, 5.0, 50.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    RUNS,
    st.integers(0, 9),
)
def test_soft_caps_sinks_and_slopes_change_the_logits_as_defined(
    lengths: list[tuple[int, int]],
    window: int | None,
    soft_cap: float | None,
    with_sinks: bool,
    with_slopes: bool,
    dtype: torch.dtype,
    run: dict[str, Any],
    seed: int,
) -> None:
    batch = random_batch(lengths, heads=6, kv_heads=2, head_dim=16, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rules: dict[str, Any] = {
        "window": window,
        "soft_cap": soft_cap,
        "sinks": 2 * torch.randn(6, generator=generator) if with_sinks else None,
        "slopes": torch.rand(6, generator=generator) if with_slopes else None,
    }
    assert_close(attend(batch, **rules, **run), attention_by_definition(batch, SCALE, **rules))


@pytest.mark.parametrize("level", list(Level))
def test_rules_hold_beyond_the_first_block_of_keys(level: Level) -> None:
    batch = random_batch([(1, 1200), (40, 1100)], heads=4, kv_heads=2, head_dim=32, page_size=16)
    rules: dict[str, Any] = {
        "soft_cap": 3.0,
        "sinks": torch.tensor([9.0, -5.0, 0.0, 3.0]),
        "slopes": torch.tensor([0.5, 0.1, 2.0, 0.0]),
    }
    assert_close(attend(batch, level=level, threads=2, **rules), attention_by_definition(batch, SCALE, **rules))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", list(Level))
def test_logits_of_any_size_neither_overflow_nor_vanish(level: Level, dtype: torch.dtype) -> None:
    batch = random_batch([(1, 600), (20, 40)], heads=4, kv_heads=2, head_dim=64, page_size=16, dtype=dtype)
    batch.query.mul_(100)
    output = attend(batch, level=level)
    assert output.isfinite().all()
    torch.testing.assert_close(output.double(), attention_by_definition(batch, SCALE), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("kept_as", [None, torch.int8])
@pytest.mark.parametrize("window", [1, 17, 130, 700])
def test_pages_before_the_window_are_not_read(window: int, kept_as: torch.dtype | None, level: Level) -> None:
    batch = random_batch(LONG, heads=4, kv_heads=2, head_dim=16, page_size=16, kept_as=kept_as)
    expected = attend(batch, window=window, level=level)
    assert torch.isfinite(expected).all()
    forget_what_is_behind(batch, window)
    assert torch.equal(attend(batch, window=window, level=level), expected)


def test_queries_may_be_strided_views_of_a_joined_product() -> None:
    batch = random_batch([(5, 30), (1, 9)], heads=6, kv_heads=2, head_dim=16)
    joined = torch.full((6, 10, 16), torch.nan)
    joined[:, :6] = batch.query
    expected = attend(batch)
    batch.query.zero_()
    pages = batch.batch.layers[0]
    output = ops.paged_attention(
        joined[:, :6], pages, batch.batch.cu_seq_q, batch.batch.seqused_k, batch.batch.block_table, SCALE
    )
    assert torch.equal(output, expected)
    turned = joined[:, :6].transpose(0, 1).contiguous().transpose(0, 1)
    output = ops.paged_attention(
        turned, pages, batch.batch.cu_seq_q, batch.batch.seqused_k, batch.batch.block_table, SCALE
    )
    assert torch.equal(output, expected)


def test_a_batch_without_tokens_gives_none() -> None:
    batch = random_batch([(0, 5), (0, 1)], heads=4, kv_heads=2)
    assert attend(batch).shape == (0, 4, 8)
    pages = batch.batch.layers[0]
    none = torch.empty(0, dtype=torch.int32)
    output = ops.paged_attention(batch.query, pages, torch.zeros(1, dtype=torch.int32), none, none.view(0, 0), SCALE)
    assert output.shape == (0, 4, 8)


def alone(batch: RandomBatch, row: int, first: int, last: int, **extra: Any) -> torch.Tensor:
    """Query tokens [first, last) of one sequence, in a step of their own."""
    step = batch.batch
    start = int(step.cu_seq_q[row])
    past = step.key_lengths[row] - step.query_lengths[row]
    return ops.paged_attention(
        batch.query[start + first : start + last],
        step.layers[0],
        torch.tensor([0, last - first], dtype=torch.int32),
        torch.tensor([past + last], dtype=torch.int32),
        step.block_table[row : row + 1],
        SCALE,
        **extra,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", list(Level))
def test_a_sequence_attends_bit_for_bit_alike_alone_in_any_batch_and_on_any_number_of_threads(
    level: Level, dtype: torch.dtype
) -> None:
    batch = random_batch(LONG, heads=9, kv_heads=3, head_dim=64, page_size=16, dtype=dtype)
    for window in (None, 600):
        together = attend(batch, level=level, window=window)
        assert torch.equal(attend(batch, level=level, window=window, threads=2), together)
        for row, rows in enumerate(together.split(list(batch.batch.query_lengths))):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert torch.equal(alone(batch, row, 0, len(rows), window=window), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", list(Level))
def test_a_batch_of_nan_leaves_nothing_behind(level: Level, dtype: torch.dtype) -> None:
    batch = random_batch(LONG, heads=9, kv_heads=3, head_dim=64, page_size=16, dtype=dtype)
    spoiled = random_batch(LONG, heads=9, kv_heads=3, head_dim=64, page_size=16, dtype=dtype)
    spoiled.value.fill_(torch.nan)
    spoiled.query.fill_(torch.nan)
    expected = attend(batch, level=level, window=130)
    assert attend(spoiled, level=level, window=130).isnan().all()
    assert torch.equal(attend(batch, level=level, window=130), expected)


@pytest.mark.parametrize("kept_as", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", list(Level))
def test_deterministic_rows_are_bit_for_bit_alike_whatever_chunks_they_are_computed_in(
    level: Level, dtype: torch.dtype, kept_as: torch.dtype | None
) -> None:
    query, length = 40, 1060
    batch = random_batch(
        [(query, length)], heads=6, kv_heads=2, head_dim=64, page_size=16, dtype=dtype, kept_as=kept_as
    )
    every = {"window": 520, "sinks": torch.ones(6), "slopes": torch.full((6,), 0.01), "soft_cap": 20.0}
    rules: dict[str, Any]
    for rules in ({}, every):
        whole = attend(batch, level=level, threads=2, deterministic=True, **rules)
        for sizes in ([1, 2, 3, 4, 30], [25, 15], [39, 1], [1] * 40):
            bounds = pairwise([0, *accumulate(sizes)])
            parts = [alone(batch, 0, first, last, deterministic=True, **rules) for first, last in bounds]
            assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_path_gives_the_same(dtype: torch.dtype) -> None:
    batch = random_batch([(1, 700), (30, 600), (6, 6)], heads=6, kv_heads=2, head_dim=64, page_size=16, dtype=dtype)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1))
    output = attend(batch, window=100, sinks=sinks)
    expected = attend_sdpa(batch.query, batch.batch.layers[0], batch.batch, SCALE, 100, sinks.to(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


def test_what_does_not_fit_together_is_refused() -> None:
    batch = random_batch([(2, 9)], heads=4, kv_heads=2)
    pages, step = batch.batch.layers[0], batch.batch

    def refused(message: str, pages: KeyValuePages = pages, query: torch.Tensor = batch.query, **changed: Any) -> None:
        given: dict[str, Any] = {
            "cu_seq_q": step.cu_seq_q,
            "key_lengths": step.seqused_k,
            "block_table": step.block_table,
            "scale": SCALE,
        }
        with pytest.raises(RuntimeError, match=message):
            ops.paged_attention(query, pages, **(given | changed))

    refused("differ in size", query=batch.query[..., :6])
    refused("no multiple", query=batch.query[:, :3])
    refused("not supported", query=batch.query.half())
    refused("adjacent", query=batch.query.transpose(1, 2))
    refused("cu_seq_q", cu_seq_q=step.cu_seq_q.long())
    refused("disagrees with the query", query=batch.query[:1])
    refused("lengths and pages", key_lengths=torch.tensor([100], dtype=torch.int32))
    refused("lengths and pages", key_lengths=torch.tensor([1], dtype=torch.int32))
    refused("sinks", sinks=torch.ones(3))
    refused("scale", scale=0.0)
