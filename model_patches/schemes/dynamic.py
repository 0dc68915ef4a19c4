"""Dynamic NTK scaling: NTK-aware scaling whose stretch follows the length of the sequence.

Knows the formula of transformers' "dynamic". Does not know how a length changes while a sequence grows.
"""

from model_patches.geometry import RopeGeometry
from model_patches.schemes.frequencies import Frequencies, geometric_series
from model_patches.schemes.ntk import ntk_base


def dynamic_frequencies(geometry: RopeGeometry, _factor: float, length: int) -> Frequencies:
    """NTK-aware at s = f·l'/L − (f−1) with l' = max(l, L), m = 1 ("Dynamic NTK", YaRN 2309.00071, section 3.3).

    l is `length` and L is `geometry.original_length`, both in tokens. f is the `factor` in the model's own dynamic
    block, 1 for any other model; f = 1 is the paper's s = max(1, l/L). The factor asked for plays no part: here the
    length alone says how far to stretch.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor 1.
    """
    own_factor: float = geometry.options("dynamic").get("factor", 1.0)
    covered = max(length, geometry.original_length)
    stretch = own_factor * covered / geometry.original_length - (own_factor - 1)
    base = ntk_base(geometry.theta, stretch, geometry.rotary_dim)
    return Frequencies(geometric_series(base, geometry.rotary_dim), 1.0)
