"""NTK-by-parts scaling: fast pairs keep their frequency, slow pairs are interpolated.

Knows the formula as all code in use has it, which is not quite the paper's: the ramp is linear in the pair's index.
Does not know attention factors; `yarn` is the same rule with one.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_patches.geometry import RopeGeometry
from model_patches.schemes.frequencies import Frequencies, geometric_series

ZERO_WIDTH = 0.001  # transformers' width, in pairs, of a ramp whose two ends meet


def ntk_by_parts_frequencies(geometry: RopeGeometry, factor: float, _length: int) -> Frequencies:
    """(1 − γ_i)·θ_i/s + γ_i·θ_i, m = 1 ("NTK-by-parts", YaRN 2309.00071, section 3.2).

    s is `factor`, θ_i the unscaled frequencies, γ_i = 1 keeps a pair (see `kept_share`). The options `beta_fast` (32),
    `beta_slow` (1) and `truncate` (true) are those of the model's own ntk-by-parts block; a model without one gets the
    defaults.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor 1.
    """
    return Frequencies(stretched_by_parts(geometry, factor, geometry.options("ntk-by-parts")), 1.0)


def stretched_by_parts(geometry: RopeGeometry, factor: float, options: Mapping[str, Any]) -> NDArray[np.float64]:
    """(1 − γ_i)·θ_i/s + γ_i·θ_i in radians per position, float64 [d / 2]; the options are those of `kept_share`."""
    unscaled = geometric_series(geometry.theta, geometry.rotary_dim)
    kept = kept_share(geometry, options)
    return (1 - kept) * unscaled / factor + kept * unscaled


def kept_share(geometry: RopeGeometry, options: Mapping[str, Any]) -> NDArray[np.float64]:
    """γ_i, the share of each pair's frequency that is kept: 1 for fast pairs, 0 for slow ones, a ramp between.

    The ramp falls from the pair that turns `beta_fast` times within the original length to the one that turns
    `beta_slow` times.

    Returns:
        float64 [d / 2], each in [0, 1].
    """
    low = pair_turning(options.get("beta_fast") or 32, geometry)
    high = pair_turning(options.get("beta_slow") or 1, geometry)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, geometry.rotary_dim - 1)
    if low == high:
        high += ZERO_WIDTH
    pairs = np.arange(geometry.rotary_dim // 2, dtype=np.float64)
    return 1 - np.clip((pairs - low) / (high - low), 0, 1)


def pair_turning(rotations: float, geometry: RopeGeometry) -> float:
    """The fractional index of the pair that turns `rotations` times within L: d·ln(L/(2πn)) / (2·ln b)."""
    turns = math.log(geometry.original_length / (rotations * 2 * math.pi))
    return geometry.rotary_dim * turns / (2 * math.log(geometry.theta))
