"""Which layers share pages, in the shapes of real models."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.cache.groups import MOST_GROUPS, MOST_PADDING, LayerGroup, group_layers, layers_of_a_page
from service.cache.needs import PageNeeds
from service.cache.pool import CacheShape
from service.cache.sizing import choose_num_pages

GEMMA3_1B = ([512] * 5 + [None]) * 4 + [512] * 2
GEMMA3_4B = ([1024] * 5 + [None]) * 5 + [1024] * 4
SHAPES: dict[str, tuple[list[int | None], int, list[tuple[int, int | None]]]] = {
    "llama": ([None] * 30, 8192, [(30, None)]),
    "mistral": ([4096] * 32, 32768, [(32, 4096)]),
    "gemma 3, 1b": (GEMMA3_1B, 32768, [(4, None), *[(4, 512)] * 5, (2, 512)]),
    "gemma 3, 4b": (GEMMA3_4B, 32768, [(5, None), *[(5, 1024)] * 5, (4, 1024)]),
    "gemma 2, 2b": ([4096, None] * 13, 8192, [(13, None), (13, 4096)]),
    "gpt-oss": ([128, None] * 12, 131072, [(12, None), (12, 128)]),
    "no longer than the window": ([4096, None] * 13, 2048, [(26, None)]),
    "a single windowed layer": ([None] * 27 + [512], 32768, [(28, None)]),
}


@pytest.mark.parametrize("model", SHAPES)
def test_the_groups_of_real_models(model: str) -> None:
    windows, length, expected = SHAPES[model]
    groups = group_layers(windows, 16, length, 512)
    assert [(len(group.layers), group.window) for group in groups] == expected
    if model in ("llama", "no longer than the window"):
        assert groups == (LayerGroup(tuple(range(len(windows))), None),)


@settings(deadline=None)
@given(
    windows=st.lists(st.sampled_from([None, 8, 20]), min_size=1, max_size=30),
    length=st.integers(1, 2000),
    chunk=st.sampled_from([8, 64]),
)
def test_every_layer_has_one_place_and_sees_no_further_than_its_group(
    windows: list[int | None], length: int, chunk: int
) -> None:
    groups = group_layers(windows, 4, length, chunk)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        for layer in group.layers:
            own = windows[layer]
            assert group.window is None or (own is not None and own <= group.window)
    each = layers_of_a_page(groups)
    assert len(groups) <= MOST_GROUPS
    assert each * len(groups) <= MOST_PADDING * len(windows)
    needs = PageNeeds(4, tuple(group.window for group in groups), max_batch_tokens=chunk)
    assert each * needs.most(length) <= len(windows) * PageNeeds(4).most(length)


def test_what_windows_save_for_a_model_of_the_shape_of_gemma_3() -> None:
    shape = CacheShape(layers=26, page_size=16, kv_heads=1, key_dim=256, value_dim=256, dtype=torch.bfloat16)
    cpu, memory, length = torch.device("cpu"), 2**30, 32768
    before = choose_num_pages(shape, cpu, memory, length)
    groups = group_layers(GEMMA3_1B, 16, length, 512)
    needs = PageNeeds(16, tuple(group.window for group in groups), max_batch_tokens=512)
    grouped = replace(shape, layers=layers_of_a_page(groups))
    after = choose_num_pages(grouped, cpu, memory, length, needs=needs)
    assert after * grouped.page_bytes <= memory
    tokens = [PageNeeds(16).tokens(before, length), needs.tokens(after, length)]
    # A page of 4 layers takes 65,536 bytes. A request has 2,048 of the global group, and 65 at most of each of the six
    # windowed ones: 511 + 512 tokens that begin anywhere. 2**30 / 65,536 / (2,048 + 6 * 65) requests are these tokens.
    assert tokens == [40320, 220209]
