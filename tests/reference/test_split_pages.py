"""What docs/context-parallel.md builds on: a sequence whose pages lie on several ranks can be grown by each rank alone
and read by merging partial attentions. The ranks are pools in this process; nothing of it is in the server."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model_patches.geometry import RopeGeometry
from model_patches.pages import KeyValuePages, PagedTensor
from model_patches.plan import make_plan
from model_patches.rerotation import PagesToMove, rerotate
from tests.reference.growing import random_tokens

PAGE_SIZE, PAGES, KV_HEADS, HEADS, DIM, RANKS = 4, 9, 2, 6, 8, 3
LENGTH = PAGES * PAGE_SIZE - 1  # the last page is partly filled
GEOMETRY = RopeGeometry(rotary_dim=DIM, theta=10000.0, original_length=16, native_length=16)
OLD, NEW = make_plan(GEOMETRY, "yarn", 1.25, 20), make_plan(GEOMETRY, "yarn", 4.0, 64)


def pool(pages: int) -> KeyValuePages:
    shape = (pages, PAGE_SIZE, KV_HEADS, DIM)
    return KeyValuePages(*(PagedTensor.allocate(shape, torch.float32, torch.device("cpu")) for _ in range(2)))


def filled() -> KeyValuePages:
    whole, generator = pool(PAGES), torch.Generator().manual_seed(3)
    for tensor in (whole.keys.data, whole.values.data):
        tensor.normal_(generator=generator)
    return whole


def dealt(whole: KeyValuePages) -> list[tuple[torch.Tensor, KeyValuePages]]:
    """Page n to rank n mod RANKS: for each rank the numbers of its pages, and its pool."""
    shares = []
    for rank in range(RANKS):
        numbers = torch.arange(rank, PAGES, RANKS)
        share = pool(len(numbers))
        share.keys.data.copy_(whole.keys.data[numbers])
        share.values.data.copy_(whole.values.data[numbers])
        shares.append((numbers, share))
    return shares


def move(held: KeyValuePages, numbers: torch.Tensor) -> None:
    """Re-rotate a pool whose page i is page numbers[i] of the sequence."""
    own = torch.arange(len(numbers))
    rerotate([held], PagesToMove(own, own, numbers), OLD, NEW, "half")


def partial_attention(
    query: NDArray[np.float64], numbers: torch.Tensor, held: KeyValuePages
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention of one token [heads, dim] over what one rank holds, in float64: [heads, dim], and log Σ exp [heads]."""
    positions = (numbers[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten().numpy()
    seen = positions < LENGTH
    cached = (tensor.data.double().numpy().reshape(-1, KV_HEADS, DIM)[seen] for tensor in (held.keys, held.values))
    keys, values = (np.repeat(tensor, HEADS // KV_HEADS, axis=1) for tensor in cached)
    weights = np.exp(np.einsum("hd,khd->hk", query, keys) / np.sqrt(DIM))
    total = weights.sum(axis=1)
    return np.einsum("hk,khd->hd", weights, values) / total[:, None], np.log(total)


def test_each_rank_re_rotates_its_own_pages_to_the_bits_of_the_whole() -> None:
    whole = filled()
    shares = dealt(whole)
    move(whole, torch.arange(PAGES))
    for numbers, share in shares:
        move(share, numbers)
        assert torch.equal(share.keys.data, whole.keys.data[numbers])


@pytest.mark.parametrize("seed", [1, 2])
def test_partial_attentions_merge_to_that_over_all_pages(seed: int) -> None:
    whole = filled()
    query = np.array(random_tokens(HEADS * DIM, seed), np.float64).reshape(HEADS, DIM) / 64 - 1
    expected, total = partial_attention(query, torch.arange(PAGES), whole)
    parts = [partial_attention(query, numbers, share) for numbers, share in dealt(whole)]
    outputs, sums = np.stack([output for output, _ in parts]), np.stack([lse for _, lse in parts])
    merged_sum = np.logaddexp.reduce(sums)
    merged = (np.exp(sums - merged_sum)[..., None] * outputs).sum(axis=0)
    np.testing.assert_allclose(merged_sum, total, rtol=1e-12)
    np.testing.assert_allclose(merged, expected, rtol=1e-10)
