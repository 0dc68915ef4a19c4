"""The pool's memory: as large as its shape says, and every token where its slot says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_patches.pages import PagedTensor
from service.cache.pool import CacheShape, allocate_pool

CPU = torch.device("cpu")
SHAPES = st.builds(
    CacheShape,
    layers=st.integers(1, 4),
    page_size=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    key_dim=st.integers(1, 8),
    value_dim=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]),
)


def tensors_of(pool: PagedTensor) -> list[torch.Tensor]:
    return [pool.data] if pool.scales is None else [pool.data, pool.scales]


@settings(deadline=None)
@given(shape=SHAPES, num_pages=st.integers(1, 6))
def test_the_bytes_of_a_page_are_those_of_the_real_tensors(shape: CacheShape, num_pages: int) -> None:
    layers = allocate_pool(shape, num_pages, CPU)
    tensors = [tensor for layer in layers for pool in (layer.keys, layer.values) for tensor in tensors_of(pool)]
    assert len(layers) == shape.layers
    assert sum(tensor.nbytes for tensor in tensors) == num_pages * shape.page_bytes
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize(("dtype", "share"), [(torch.int8, 0.53), (torch.float8_e4m3fn, 0.5), (torch.float32, 2.0)])
def test_what_a_page_takes_against_bfloat16(dtype: torch.dtype, share: float) -> None:
    shape = CacheShape(layers=2, page_size=16, kv_heads=3, key_dim=64, value_dim=64, dtype=torch.bfloat16)
    ratio = replace(shape, dtype=dtype).page_bytes / shape.page_bytes
    assert share - 0.02 <= ratio <= share


@settings(deadline=None)
@given(shape=SHAPES, num_pages=st.integers(1, 6), data=st.data())
def test_keys_and_values_land_in_their_slots_and_nowhere_else(
    shape: CacheShape, num_pages: int, data: st.DataObject
) -> None:
    every = list(range(num_pages * shape.page_size))
    slots = data.draw(st.lists(st.sampled_from(every), unique=True))
    layers = allocate_pool(shape, num_pages, CPU)
    for layer in layers:
        layer.write(torch.tensor(every), *tokens_of(shape, [-1.0] * len(every), [-2.0] * len(every)))
    keys, values = [float(slot + 1) for slot in slots], [float(slot + 100) for slot in slots]
    layers[-1].write(torch.tensor(slots, dtype=torch.int64), *tokens_of(shape, keys, values))

    for layer in layers:
        written = set(slots) if layer is layers[-1] else set()
        expected = tokens_of(
            shape,
            [slot + 1.0 if slot in written else -1.0 for slot in every],
            [slot + 100.0 if slot in written else -2.0 for slot in every],
        )
        for pool, tokens in zip((layer.keys, layer.values), expected, strict=True):
            held = pool.load(torch.arange(num_pages)).flatten(0, 1)
            torch.testing.assert_close(held, tokens, rtol=0.07, atol=0)  # float8 has steps of an eighth


def tokens_of(shape: CacheShape, keys: list[float], values: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that are one number each."""
    key, value = (torch.tensor(numbers)[:, None, None] for numbers in (keys, values))
    return key.expand(-1, shape.kv_heads, shape.key_dim), value.expand(-1, shape.kv_heads, shape.value_dim)
