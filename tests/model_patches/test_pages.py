"""Paged memory: what was written comes back, as exactly as its type allows, and only where it was written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_patches.pages import KeyValuePages, PagedTensor

CPU = torch.device("cpu")
EXACT = [torch.float32, torch.bfloat16, torch.float16]
KINDS = [*EXACT, torch.int8, torch.float8_e4m3fn]
SHAPE = (5, 4, 2, 8)  # pages, page_size, kv_heads, dim
SLOTS = SHAPE[0] * SHAPE[1]


def filled(dtype: torch.dtype, seed: int = 0) -> PagedTensor:
    """Pages in which every slot holds something."""
    pages = PagedTensor.allocate(SHAPE, dtype, CPU)
    pages.write(torch.arange(SLOTS), torch.randn(SLOTS, *SHAPE[2:], generator=torch.Generator().manual_seed(seed)))
    return pages


def bits(pages: PagedTensor) -> list[torch.Tensor]:
    """A copy of every byte, scales too, one row for each page."""
    tensors = [pages.data] if pages.scales is None else [pages.data, pages.scales]
    return [tensor.flatten(1).view(torch.uint8).clone() for tensor in tensors]


def bound(dtype: torch.dtype, rows: torch.Tensor) -> torch.Tensor:
    """How far each number of rows [..., dim] may come back from what it was."""
    if dtype == torch.int8:  # half a scale, which is rounded to float16
        scale = (rows.abs().amax(-1, keepdim=True) / 127).clamp_min(2.0**-14)
        return (scale / 2 * (1 + 2.0**-10)).expand(rows.shape)
    if dtype == torch.float8_e4m3fn:  # three bits after the first one, down to steps of 2^-9
        return (rows.abs() * 2.0**-4).clamp_min(2.0**-10)
    smallest = 2.0**-25 if dtype == torch.float16 else 0.0
    return (rows.abs() * torch.finfo(dtype).eps / 2).clamp_min(smallest)


@pytest.mark.parametrize("dtype", KINDS)
@settings(deadline=None, max_examples=30)
@given(
    slots=st.lists(st.integers(0, SLOTS - 1), unique=True),
    magnitude=st.sampled_from([1e-6, 1e-3, 1.0, 30.0]),
    seed=st.integers(0, 100),
)
def test_rows_come_back_within_the_bound_of_their_type_and_other_slots_keep_their_bits(
    dtype: torch.dtype, slots: list[int], magnitude: float, seed: int
) -> None:
    pages = filled(dtype)
    before = pages.load(torch.arange(SHAPE[0])).flatten(0, 1)
    rows = magnitude * torch.randn(len(slots), *SHAPE[2:], generator=torch.Generator().manual_seed(seed))
    pages.write(torch.tensor(slots, dtype=torch.int64), rows)
    after = pages.load(torch.arange(SHAPE[0])).flatten(0, 1)
    assert bool(((after[slots] - rows).abs() <= bound(dtype, rows)).all())
    others = sorted(set(range(SLOTS)) - set(slots))
    assert torch.equal(after[others], before[others])


def test_the_scale_of_a_row_is_its_own_largest_magnitude_by_127() -> None:
    pages = filled(torch.int8)
    rows = torch.randn(2, *SHAPE[2:]) * torch.tensor([1.0, 50.0])[:, None, None]
    pages.write(torch.tensor([3, 4]), rows)
    assert pages.scales is not None
    assert pages.scales.dtype == torch.float16
    torch.testing.assert_close(
        pages.scales.flatten(0, 1)[[3, 4]].float(), rows.abs().amax(-1) / 127, rtol=2.0**-11, atol=0
    )
    assert bool((pages.data.flatten(0, 1)[[3, 4]].abs().amax(-1) == 127).all())


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-7, 1e6, 1e38])
def test_numbers_however_small_or_large_come_back_finite_with_their_sign(dtype: torch.dtype, magnitude: float) -> None:
    if dtype == torch.float16:
        magnitude = min(magnitude, torch.finfo(dtype).max)
    row = torch.tensor([1.0, -1.0] * 4).expand(1, *SHAPE[2:]) * magnitude
    pages = filled(dtype)
    pages.write(torch.tensor([7]), row)
    back = pages.load(torch.tensor([1]))[0, 3]
    assert bool(back.isfinite().all())
    assert bool((back.sign() * row[0].sign() >= 0).all())
    assert magnitude < 1 or bool((back.sign() == row[0].sign()).all())


@pytest.mark.parametrize("dtype", KINDS)
@settings(deadline=None, max_examples=30)
@given(chosen=st.lists(st.integers(0, SHAPE[0] - 1), unique=True), seed=st.integers(0, 100))
def test_storing_what_was_loaded_changes_no_bit(dtype: torch.dtype, chosen: list[int], seed: int) -> None:
    pages = filled(dtype, seed)
    before = bits(pages)
    index = torch.tensor(chosen, dtype=torch.int64)
    content = pages.load(index)
    assert content.dtype == torch.float32
    assert content.shape == (len(chosen), *SHAPE[1:])
    pages.store(index, content)
    assert all(torch.equal(old, new) for old, new in zip(before, bits(pages), strict=True))


@pytest.mark.parametrize("dtype", KINDS)
def test_whole_pages_are_stored_where_they_belong_within_the_bound(dtype: torch.dtype) -> None:
    pages = filled(dtype)
    before = bits(pages)
    content = torch.randn(2, *SHAPE[1:])
    pages.store(torch.tensor([4, 1]), content)
    assert bool(((pages.load(torch.tensor([4, 1])) - content).abs() <= bound(dtype, content)).all())
    assert all(torch.equal(old[[0, 2, 3]], new[[0, 2, 3]]) for old, new in zip(before, bits(pages), strict=True))


@pytest.mark.parametrize("dtype", KINDS)
def test_a_copied_page_has_every_bit_of_its_source_and_other_pages_keep_theirs(dtype: torch.dtype) -> None:
    pages = filled(dtype)
    before = bits(pages)
    pages.copy(torch.tensor([0, 3]), torch.tensor([4, 1]))
    for old, new in zip(before, bits(pages), strict=True):
        assert torch.equal(new, old[[0, 3, 2, 3, 0]])


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("wanted", EXACT)
def test_gathered_pages_are_the_loaded_ones_rounded_once(dtype: torch.dtype, wanted: torch.dtype) -> None:
    pages = filled(dtype)
    gathered = pages.gather(torch.tensor([2, 0, 2], dtype=torch.int32), wanted)
    assert gathered.dtype == wanted
    assert torch.equal(gathered, pages.load(torch.tensor([2, 0, 2])).to(wanted))


@pytest.mark.parametrize("dtype", KINDS)
def test_pages_can_begin_as_zeros(dtype: torch.dtype) -> None:
    pages = filled(dtype)
    pages.zero_()
    assert not any(tensor.any() for tensor in bits(pages))


@pytest.mark.parametrize("dtype", KINDS)
def test_keys_and_values_may_differ_in_size_and_go_each_to_its_own_place(dtype: torch.dtype) -> None:
    layer = KeyValuePages(
        PagedTensor.allocate((2, 4, 3, 6), dtype, CPU), PagedTensor.allocate((2, 4, 3, 2), dtype, CPU)
    )
    key, value = torch.randn(8, 3, 6), torch.randn(8, 3, 2)
    layer.write(torch.arange(8), key, value)
    every = torch.arange(2)
    assert bool(((layer.keys.load(every).flatten(0, 1) - key).abs() <= bound(dtype, key)).all())
    assert bool(((layer.values.load(every).flatten(0, 1) - value).abs() <= bound(dtype, value)).all())
