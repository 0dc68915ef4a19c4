"""Cached keys moved from one plan to another, without the model.

Knows plans and pages. Does not know sequences, or when a plan changes. Rotations in a plane commute, so a key cached as
m1·R(θ1·p)·k becomes that of another plan by (m2/m1)·R((θ2 − θ1)·p): exact but for rounding. Values are not rotated.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch

from model_patches.geometry import Layout
from model_patches.kernels import ops
from model_patches.pages import KeyValuePages, PagedTensor
from model_patches.plan import PositionPlan

PAGES_AT_A_TIME = 1024  # bounds what is held in float32: 16,384 tokens of one layer with pages of 16


class PagesToMove(NamedTuple):
    """Whole pages of one sequence.

    Attributes:
        sources: int64 [n], where the keys and values are.
        targets: int64 [n], where they go: equal to the source for a page that is changed in place.
        numbers: int64 [n], which page of the sequence each is, from 0; page × page_size is its first position.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    numbers: torch.Tensor


@torch.inference_mode()
def rerotate(
    layers: Sequence[KeyValuePages],
    pages: PagesToMove,
    old: PositionPlan,
    new: PositionPlan,
    layout: Layout,
    offset: int = 0,
    local_layers: Set[int] = frozenset(),
) -> None:
    """Re-rotate keys and copy them, with their values, where source and target differ.

    Angles are float64, rounded to float32 once; the products are float32, rounded to the cache's dtype once.

    Args:
        layers: the pool.
        pages: what to move; targets that differ from their sources are no sources themselves.
        old: the plan that the sources are rotated under.
        new: the plan for the targets; of the same geometry.
        layout: which dimensions are rotated together.
        offset: the first rotated dimension of a key.
        local_layers: numbers of the layers whose keys no plan rotates; they are only copied.
    """
    for start in range(0, len(pages.sources), PAGES_AT_A_TIME):
        some = PagesToMove(*(column[start : start + PAGES_AT_A_TIME].contiguous() for column in pages))
        cos, sin = _waves(some.numbers, layers[0].keys.data.shape[1], old, new)
        copied = some.sources != some.targets
        sources, targets = some.sources[copied], some.targets[copied]
        for number, layer in enumerate(layers):
            if number in local_layers:
                layer.keys.copy(sources, targets)
            else:
                _rotate_pages(layer.keys, some, cos, sin, layout, offset)
            layer.values.copy(sources, targets)


@torch.inference_mode()
def copy_pages(layers: Sequence[KeyValuePages], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy keys and values bit for bit, of models without rotations too. All are read before any is written.

    Args:
        layers: the pool.
        sources: int64 [n], the pages to read.
        targets: int64 [n], the pages to write, none twice.
    """
    for layer in layers:
        layer.keys.copy(sources, targets)
        layer.values.copy(sources, targets)


def _waves(
    numbers: torch.Tensor, page_size: int, old: PositionPlan, new: PositionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of (θ2 − θ1)·p, times m2/m1, each float32 [n, page_size, pairs]."""
    device = numbers.device
    positions = numbers[:, None] * page_size + torch.arange(page_size, device=device)
    turn = torch.tensor(new.inv_freq, dtype=torch.float64) - torch.tensor(old.inv_freq, dtype=torch.float64)
    angles = positions.to(torch.float64)[..., None] * turn.to(device)
    factor = new.attention_factor / old.attention_factor
    return (angles.cos() * factor).to(torch.float32), (angles.sin() * factor).to(torch.float32)


def _rotate_pages(
    keys: PagedTensor, pages: PagesToMove, cos: torch.Tensor, sin: torch.Tensor, layout: Layout, offset: int
) -> None:
    """One layer's keys: by the C++ operator where it takes them, else by torch."""
    if keys.scales is None and ops.supports(keys.data.device, keys.dtype, keys.dtype) and ops.are_loaded():
        interleaved = layout == "interleaved"
        ops.rerotate(keys, pages.sources, pages.targets, cos, sin, offset=offset, interleaved=interleaved)
        return
    content = keys.load(pages.sources)
    _rotate(content[..., offset : offset + 2 * cos.shape[-1]], cos, sin, layout)
    keys.store(pages.targets, content)


def _rotate(rotated: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout) -> None:
    """Rotate every pair in place; `rotated` is float32 [n, page_size, kv_heads, rotary_dim]."""
    pairs = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    if layout == "half":
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    turned = first * cos - second * sin
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
