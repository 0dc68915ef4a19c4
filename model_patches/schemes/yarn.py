"""YaRN: NTK-by-parts scaling with sharpened attention.

Knows the formulas as all code in use has them. Does not know which models were trained with it.
"""

import math
from collections.abc import Mapping
from typing import Any

from model_patches.geometry import RopeGeometry
from model_patches.schemes.frequencies import Frequencies
from model_patches.schemes.ntk_by_parts import stretched_by_parts


def yarn_frequencies(geometry: RopeGeometry, factor: float, _length: int) -> Frequencies:
    """(1 − γ_i)·θ_i/s + γ_i·θ_i, m = 0.1·ln s + 1 (YaRN, 2309.00071, sections 3.2 and 3.4).

    s is `factor`, θ_i the unscaled frequencies, γ_i = 1 keeps a pair (see `ntk_by_parts.kept_share`). The options
    `beta_fast` (32), `beta_slow` (1), `truncate` (true), `attention_factor`, `mscale` and `mscale_all_dim` are those of
    the model's own yarn block; a model without one gets the defaults.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor m.
    """
    options = geometry.options("yarn")
    return Frequencies(stretched_by_parts(geometry, factor, options), attention_factor(factor, options))


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
