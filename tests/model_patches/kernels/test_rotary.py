"""The operator that rotates and writes, against the definition in float64 and against the pages' own packing."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_patches.kernels import ops
from model_patches.kernels.ops import Level
from model_patches.pages import KeyValuePages, PagedTensor
from tests.model_patches.kernels.reference import rotated_by_definition

pytestmark = pytest.mark.usefixtures("operators")

CPU = torch.device("cpu")
SIZES = st.sampled_from([(8, 8, 4), (64, 64, 32), (64, 64, 16), (80, 24, 16), (33, 7, 5), (128, 128, 64), (10, 5, 1)])
"""Dimensions of a key and of a value, and rotated pairs."""


def empty_pages(kept_as: torch.dtype, kv_heads: int, dims: tuple[int, int]) -> KeyValuePages:
    pages = KeyValuePages(*(PagedTensor.allocate((6, 4, kv_heads, dim), kept_as, CPU) for dim in dims))
    for kept in (pages.keys, pages.values):
        kept.zero_()
    return pages


def rows_in(pages: PagedTensor, slots: torch.Tensor) -> torch.Tensor:
    """What some slots hold, float32 [T, kv_heads, dim]."""
    return pages.load(torch.arange(pages.shape[0])).flatten(0, 1)[slots]


@settings(deadline=None, max_examples=120)
@given(
    st.integers(0, 24),
    st.tuples(st.integers(1, 12), st.integers(1, 3)),
    SIZES,
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.sampled_from(list(Level)),
    st.integers(1, 2),
    st.integers(0, 9),
)
def test_rows_are_rotated_and_land_in_their_slots(
    tokens: int,
    heads: tuple[int, int],
    sizes: tuple[int, int, int],
    interleaved: bool,
    in_place: bool,
    dtype: torch.dtype,
    as_int8: bool,
    level: Level,
    threads: int,
    seed: int,
) -> None:
    kv_heads, (key_dim, value_dim, pairs) = heads[1], sizes
    generator = torch.Generator().manual_seed(seed)
    width = (heads[0] * kv_heads + kv_heads) * key_dim + kv_heads * value_dim
    joined = torch.randn(tokens, width, generator=generator).to(dtype)
    split = [heads[0] * kv_heads * key_dim, kv_heads * key_dim, kv_heads * value_dim]
    query, key, value = (
        part.unflatten(1, (-1, dim))
        for part, dim in zip(joined.split(split, dim=1), (key_dim, key_dim, value_dim), strict=True)
    )
    angles = torch.randn(tokens, pairs, generator=generator)
    cos, sin = 1.1 * angles.cos(), 1.1 * angles.sin()
    slots = torch.randperm(24, generator=generator)[:tokens]
    pages = empty_pages(torch.int8 if as_int8 else dtype, kv_heads, (key_dim, value_dim))
    untouched = torch.tensor(sorted(set(range(24)) - set(slots.tolist())), dtype=torch.int64)
    expected_query, expected_key = (rotated_by_definition(rows, cos, sin, interleaved) for rows in (query, key))
    expected_value = value.clone()
    torch.set_num_threads(threads)
    ops.limit_level(level)

    rotated = ops.rotate_and_write(
        query, key, value, cos, sin, slots, pages, interleaved=interleaved, out=query if in_place else None
    )
    torch.set_num_threads(1)

    assert rotated.dtype == dtype
    assert (rotated.data_ptr() == query.data_ptr()) == (in_place or tokens == 0)
    assert_rounded_once(rotated, expected_query)
    if as_int8:
        step = rows_in(PagedTensor(torch.ones_like(pages.keys.data), pages.keys.scales), slots).double()
        assert ((rows_in(pages.keys, slots).double() - expected_key).abs() <= 0.501 * step).all()
    else:
        assert_rounded_once(rows_in(pages.keys, slots).to(dtype), expected_key)
    again = empty_pages(pages.values.dtype, kv_heads, (key_dim, value_dim))
    again.values.write(slots, expected_value)
    assert torch.equal(again.values.data, pages.values.data)
    if as_int8:
        assert again.values.scales is not None
        assert pages.values.scales is not None
        assert torch.equal(again.values.scales, pages.values.scales)
    assert not rows_in(pages.keys, untouched).any()


def assert_rounded_once(rows: torch.Tensor, exact: torch.Tensor) -> None:
    """Off by half a unit in the last place, and what float32 arithmetic adds to it."""
    half_unit = 2.0**-8 if rows.dtype == torch.bfloat16 else 2.0**-22
    torch.testing.assert_close(rows.double(), exact, rtol=half_unit * 1.002, atol=1e-6)


@pytest.mark.parametrize("level", list(Level))
def test_int8_is_packed_bit_for_bit_as_the_pages_pack_it(level: Level) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(24, 2, 33, generator=generator) * 10.0 ** torch.arange(-12, 12)[:, None, None]
    rows[5] = 0
    rows[7, 0, 3] = 1e9
    pages, expected = (empty_pages(torch.int8, 2, (33, 33)) for _ in range(2))
    slots = torch.randperm(24, generator=generator)
    none = torch.empty(24, 0)
    ops.limit_level(level)
    ops.rotate_and_write(rows, rows, rows, none, none, slots, pages)
    expected.write(slots, rows, rows)
    for ours, theirs in ((pages.keys, expected.keys), (pages.values, expected.values)):
        assert ours.scales is not None
        assert theirs.scales is not None
        assert torch.equal(ours.scales, theirs.scales)
        assert torch.equal(ours.data, theirs.data)


@pytest.mark.parametrize("level", list(Level))
def test_bfloat16_is_rounded_to_the_nearest_even_as_torch_rounds(level: Level) -> None:
    """Bits that lie half way between two bfloat16, just above and just below, through a rotation by nothing."""
    bits = torch.arange(0x3F800000, 0x3F800000 + 24 * 64 * 0x4000, 0x4000, dtype=torch.int32)
    exact = torch.cat([bits, bits + 1, bits - 1]).view(torch.float32).view(-1, 1, 64)
    halves = exact.to(torch.bfloat16)
    second = (exact - halves.float()).to(torch.bfloat16)
    # cos = 1 and sin = -1 add what was cut off back to the rounded number, exactly in float32.
    head = torch.cat([halves, second], dim=-1)
    ones = torch.ones(len(head), 64)
    pages = KeyValuePages(*(PagedTensor.allocate((18, 4, 1, 128), torch.bfloat16, CPU) for _ in range(2)))
    slots = torch.arange(72)
    ops.limit_level(level)
    rotated = ops.rotate_and_write(head, head, head, ones, -ones, slots, pages)
    expected = (halves.float() + second.float()).to(torch.bfloat16)
    assert torch.equal(rotated[..., :64], expected)


def test_what_does_not_fit_together_is_refused() -> None:
    pages = empty_pages(torch.float32, 2, (8, 8))
    rows, waves, slots = torch.zeros(3, 2, 8), torch.zeros(3, 4), torch.arange(3)

    def refused(message: str, **changed: Any) -> None:
        given: dict[str, Any] = {
            "query": rows,
            "key": rows,
            "value": rows,
            "cos": waves,
            "sin": waves,
            "slots": slots,
            "pages": pages,
        }
        with pytest.raises(RuntimeError, match=message):
            ops.rotate_and_write(**(given | changed))

    refused("differ in number", key=rows[:2])
    refused("fit their pages", value=rows[..., :6])
    refused("smaller than what is rotated", cos=torch.zeros(3, 5))
    refused("number types differ", key=rows.bfloat16())
    refused("cos", cos=waves.double())
    refused("sin", sin=waves[:2])
    refused("outside the pages", slots=slots + 22)
    refused("slots", slots=slots.int())
    refused("rotated", out=torch.zeros(3, 2, 6))
