"""Llama 3.1's scaling: NTK-by-parts with a ramp that is linear in the rotations a pair makes.

Knows the formula. Does not know which models were trained with it.
"""

import math

import numpy as np

from model_patches.geometry import RopeGeometry
from model_patches.schemes.frequencies import Frequencies, geometric_series


def llama3_frequencies(geometry: RopeGeometry, factor: float, _length: int) -> Frequencies:
    """(1 − γ_i)·θ_i/s + γ_i·θ_i with γ_i = clip((L/λ_i − low) / (high − low), 0, 1), m = 1 (code of Llama 3.1).

    s is `factor`, θ_i the unscaled frequencies, λ_i = 2π/θ_i their wavelengths in tokens, L the original length. The
    options `low_freq_factor` (1) and `high_freq_factor` (4) are those of the model's own llama3 block; a model without
    one gets the defaults.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor 1.
    """
    options = geometry.options("llama3")
    low, high = options.get("low_freq_factor", 1.0), options.get("high_freq_factor", 4.0)
    unscaled = geometric_series(geometry.theta, geometry.rotary_dim)
    rotations = geometry.original_length * unscaled / (2 * math.pi)
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    return Frequencies((1 - kept) * unscaled / factor + kept * unscaled, 1.0)
