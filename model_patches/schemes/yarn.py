"""YaRN: fast pairs keep their frequency, slow pairs are interpolated, attention is sharpened.

Knows the formulas as all code in use has them, which is not quite the paper's: the ramp is linear in the pair's index.
Does not know which models were trained with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from model_patches.schemes.frequencies import Frequencies, geometric_series

if TYPE_CHECKING:
    from model_patches.geometry import RopeGeometry

ZERO_WIDTH = 0.001  # transformers' width, in pairs, of a ramp whose two ends meet


def yarn_frequencies(geometry: RopeGeometry, factor: float, _length: int) -> Frequencies:
    """(1 − γ_i)·θ_i/s + γ_i·θ_i, m = 0.1·ln s + 1 (YaRN, 2309.00071, sections 3.2 and 3.4).

    s is `factor`, θ_i the unscaled frequencies, γ_i = 1 keeps a pair (see `kept_share`). The options `beta_fast` (32),
    `beta_slow` (1), `truncate` (true), `attention_factor`, `mscale` and `mscale_all_dim` are those of the model's own
    yarn block; a model without one gets the defaults.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor m.
    """
    options = geometry.options("yarn")
    unscaled = geometric_series(geometry.theta, geometry.rotary_dim)
    kept = kept_share(geometry, options)
    return Frequencies((1 - kept) * unscaled / factor + kept * unscaled, attention_factor(factor, options))


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


def attention_factor(factor: float, options: Mapping[str, Any]) -> float:
    """m: the model's explicit one, else DeepSeek's ratio g(s, mscale) / g(s, mscale_all_dim), else 0.1·ln s + 1."""
    explicit = options.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    mscale, mscale_all_dim = options.get("mscale"), options.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return sharpening(factor, mscale) / sharpening(factor, mscale_all_dim)
    return sharpening(factor, 1.0)


def sharpening(factor: float, weight: float) -> float:
    """g(s, x) = 0.1·x·ln s + 1, and 1 where nothing is stretched (YaRN, equation 22, with DeepSeek's weight x)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
