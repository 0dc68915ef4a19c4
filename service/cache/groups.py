"""Which layers of a model share their pages. Knows windows and numbers of layers; does not know sequences or memory."""

from collections.abc import Sequence
from typing import NamedTuple

from service.cache.needs import PageNeeds

MOST_GROUPS = 8  # each costs a block table, and a page at a time
MOST_PADDING = 1.25  # layers that pages have room for, over those that there are


class LayerGroup(NamedTuple):
    """Layers of which a page holds all.

    Attributes:
        layers: their numbers in the model, rising; the first is in the first place of a page, and so on.
        window: how many of the latest tokens they see at most; None for all.
    """

    layers: tuple[int, ...]
    window: int | None


def group_layers(
    windows: Sequence[int | None], page_size: int, max_length: int, max_batch_tokens: int, refresh_tokens: int = 0
) -> tuple[LayerGroup, ...]:
    """Sort layers into groups of at most n, those that see everything first.

    A page holds the keys and values of one group, and all pages are alike, so that one pool serves all groups and no
    share of the memory has to be foretold: short sequences need as much of every layer, long ones hardly anything of
    windowed layers. (vLLM's hybrid cache manager does the same.) A last group with fewer than n layers leaves room in
    its pages empty; n is what the longest sequence takes least memory with, unless that room or the number of groups
    gets out of hand. Where windows save nothing, all layers are one group.

    Args:
        windows: for each layer, how many of the latest tokens it sees; None for all.
        page_size: tokens in one page.
        max_length: tokens of the longest sequence.
        max_batch_tokens: tokens of one step, at most.
        refresh_tokens: see `PageNeeds`.
    """

    def cost(groups: tuple[LayerGroup, ...]) -> tuple[int, int]:
        held = tuple(group.window for group in groups)
        needs = PageNeeds(page_size, held, max_batch_tokens=max_batch_tokens, refresh_tokens=refresh_tokens)
        return layers_of_a_page(groups) * needs.most(max_length), len(groups)

    ways = (_in_groups_of(most, windows) for most in range(1, len(windows) + 1))
    allowed = (
        groups
        for groups in ways
        if len(groups) <= MOST_GROUPS and len(groups) * layers_of_a_page(groups) <= MOST_PADDING * len(windows)
    )
    widest = None if None in windows else max(window for window in windows if window is not None)
    together = LayerGroup(tuple(range(len(windows))), widest)
    return min([(together,), *allowed], key=cost)


def layers_of_a_page(groups: Sequence[LayerGroup]) -> int:
    """How many layers a page has room for."""
    return max(len(group.layers) for group in groups)


def _in_groups_of(most: int, windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    groups = []
    for window in sorted(set(windows), key=lambda window: (window is not None, window)):
        layers = [layer for layer, own in enumerate(windows) if own == window]
        groups += [LayerGroup(tuple(layers[i : i + most]), window) for i in range(0, len(layers), most)]
    return tuple(groups)
