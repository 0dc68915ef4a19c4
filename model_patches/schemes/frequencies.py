"""What goes into a scheme and what comes out of it.

Knows the shape of the contract and the one series that every scheme starts from. Does not know any scheme.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from model_patches.geometry import RopeGeometry


class Frequencies(NamedTuple):
    """What a scheme computes.

    Attributes:
        inv_freq: inverse frequencies in radians per position, float64 [rotary_dim / 2], fastest pair first.
        attention_factor: m, multiplied into cos and sin of both q and k (so logits are multiplied by m²).
    """

    inv_freq: NDArray[np.float64]
    attention_factor: float


class Scheme(Protocol):
    """A pure function from a model's geometry and a stretch to frequencies."""

    def __call__(self, geometry: RopeGeometry, factor: float, length: int, /) -> Frequencies:
        """Compute the frequencies.

        Args:
            geometry: the model's rotary geometry.
            factor: s >= 1, how far the original length is stretched.
            length: the longest sequence to cover, in tokens; only length-dependent schemes use it.
        """


def geometric_series(base: float, rotary_dim: int) -> NDArray[np.float64]:
    """θ_i = base^(−2i/d) for i = 0..d/2−1, in radians per position (RoFormer, 2104.09864, section 3.2.2).

    Args:
        base: b, above 1.
        rotary_dim: d, even.

    Returns:
        float64 [rotary_dim / 2], falling from exactly 1.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    return np.power(base, -exponents)
