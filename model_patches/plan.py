"""The positional plan: one scheme at one factor, frozen.

Knows the numbers that rotate a sequence. Does not know which request uses them or why; that is `service.scaling`.
"""

from dataclasses import dataclass

from model_patches.geometry import RopeGeometry
from model_patches.schemes import SCHEMES


@dataclass(frozen=True)
class PositionPlan:
    """How every token of a sequence is rotated.

    Equal plans rotate alike.

    Attributes:
        scheme: a key of `model_patches.schemes.SCHEMES`.
        factor: s, how far the original length is stretched; 1.0 is unscaled.
        max_length: the longest sequence, in tokens, that the plan covers.
        inv_freq: inverse frequencies in radians per position, float64, one for each pair; length rotary_dim / 2.
        attention_factor: m, multiplied into cos and sin of both q and k.
    """

    scheme: str
    factor: float
    max_length: int
    inv_freq: tuple[float, ...]
    attention_factor: float


def make_plan(geometry: RopeGeometry, scheme: str, factor: float, max_length: int) -> PositionPlan:
    """Compute the plan of one scheme at one factor.

    Args:
        geometry: the model's rotary geometry.
        scheme: a key of `SCHEMES`; KeyError otherwise.
        factor: s >= 1.
        max_length: the longest sequence the plan has to cover, in tokens.
    """
    frequencies = SCHEMES[scheme](geometry, factor, max_length)
    return PositionPlan(
        scheme=scheme,
        factor=factor,
        max_length=max_length,
        inv_freq=tuple(frequencies.inv_freq.tolist()),
        attention_factor=frequencies.attention_factor,
    )
