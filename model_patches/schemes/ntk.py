"""NTK-aware scaling: a larger base at a fixed factor.

Knows the formula. Does not know lengths; `dynamic` is the same rule driven by the length.
"""

import math

from model_patches.geometry import RopeGeometry
from model_patches.schemes.frequencies import Frequencies, geometric_series


def ntk_base(base: float, stretch: float, rotary_dim: int) -> float:
    """b·s^(d/(d−2)): the base that divides the slowest of d/2 pairs by exactly s and leaves the fastest at 1.

    Args:
        base: b, the model's own base.
        stretch: s >= 1.
        rotary_dim: d, at least 4 (a single pair cannot be both kept and stretched).
    """
    return base * math.pow(stretch, rotary_dim / (rotary_dim - 2))


def ntk_frequencies(geometry: RopeGeometry, factor: float, _length: int) -> Frequencies:
    """θ'_i = b'^(−2i/d) with b' = b·s^(d/(d−2)), m = 1 ("NTK-aware", YaRN 2309.00071, section 3.1).

    b is `geometry.theta`, d is `geometry.rotary_dim`, s is `factor`.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor 1.
    """
    base = ntk_base(geometry.theta, factor, geometry.rotary_dim)
    return Frequencies(geometric_series(base, geometry.rotary_dim), 1.0)
