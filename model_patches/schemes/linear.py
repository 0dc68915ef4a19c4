"""Linear scaling, also called Position Interpolation (PI).

Knows the formula of the paper. Does not know lengths.
"""

from model_patches.geometry import RopeGeometry
from model_patches.schemes.frequencies import Frequencies, geometric_series


def linear_frequencies(geometry: RopeGeometry, factor: float, _length: int) -> Frequencies:
    """θ_i / s, m = 1 (Position Interpolation, 2306.15595, equation 4: position p becomes p / s).

    s is `factor`, θ_i the unscaled frequencies: every pair is slowed alike.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor 1.
    """
    return Frequencies(geometric_series(geometry.theta, geometry.rotary_dim) / factor, 1.0)
