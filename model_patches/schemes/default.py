"""The default scheme: RoPE as the model was trained, unscaled.

Knows RoFormer's formula. Does not know lengths.
"""

from model_patches.geometry import RopeGeometry
from model_patches.schemes.frequencies import Frequencies, geometric_series


def default_frequencies(geometry: RopeGeometry, _factor: float, _length: int) -> Frequencies:
    """θ_i = b^(−2i/d), m = 1 (RoFormer, 2104.09864, section 3.2.2).

    b is `geometry.theta`, d is `geometry.rotary_dim`, i = 0..d/2−1. Whoever asks for a factor asks for another scheme.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor 1.
    """
    return Frequencies(geometric_series(geometry.theta, geometry.rotary_dim), 1.0)
