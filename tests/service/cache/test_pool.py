"""The pool's memory: as large as its shape says, and every token where its slot says."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.cache.pool import CacheShape, allocate_pool

CPU = torch.device("cpu")
SHAPES = st.builds(
    CacheShape,
    layers=st.integers(1, 4),
    page_size=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)


@settings(deadline=None)
@given(shape=SHAPES, num_pages=st.integers(1, 6))
def test_the_bytes_of_a_page_are_those_of_the_real_tensors(shape: CacheShape, num_pages: int) -> None:
    layers = allocate_pool(shape, num_pages, CPU)
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    assert len(layers) == shape.layers
    assert sum(tensor.nbytes for tensor in tensors) == num_pages * shape.page_bytes
    assert len({tensor.data_ptr() for tensor in tensors}) == 2 * shape.layers


@settings(deadline=None)
@given(shape=SHAPES, num_pages=st.integers(1, 6), data=st.data())
def test_keys_and_values_land_in_their_slots_and_nowhere_else(
    shape: CacheShape, num_pages: int, data: st.DataObject
) -> None:
    slots = data.draw(st.lists(st.integers(0, num_pages * shape.page_size - 1), unique=True))
    layers = allocate_pool(shape, num_pages, CPU)
    for layer in layers:
        layer.keys.fill_(-1)
        layer.values.fill_(-2)
    token = (shape.kv_heads, shape.head_dim)
    count = len(slots) * shape.kv_heads * shape.head_dim
    keys = torch.arange(count, dtype=torch.float32).view(len(slots), *token) / 8
    layers[-1].write(torch.tensor(slots, dtype=torch.int64), keys, keys + 0.5)

    expected_keys = {slot: keys[index] for index, slot in enumerate(slots)}
    for slot in range(num_pages * shape.page_size):
        key = expected_keys.get(slot, torch.full(token, -1.0))
        value = expected_keys[slot] + 0.5 if slot in expected_keys else torch.full(token, -2.0)
        page, offset = divmod(slot, shape.page_size)
        assert torch.equal(layers[-1].keys[page, offset], key.to(shape.dtype))
        assert torch.equal(layers[-1].values[page, offset], value.to(shape.dtype))
    for layer in layers[:-1]:
        assert bool((layer.keys == -1).all())
        assert bool((layer.values == -2).all())
