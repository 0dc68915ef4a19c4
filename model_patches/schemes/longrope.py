"""LongRoPE: every pair is slowed by its own searched divisor, from one table for short and one for long sequences.

Knows the formula. Does not know the tables: they belong to a model, and only its own config has them.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.schemes.frequencies import Frequencies, geometric_series


def longrope_frequencies(geometry: RopeGeometry, _factor: float, length: int) -> Frequencies:
    """θ_i / e_i, m = √(1 + ln s / ln L) (LongRoPE, 2402.13753; m and the switch of tables as in Phi-3's code).

    e is the table `short_factor` while `length` <= L and `long_factor` above, each of d/2 divisors without a unit.
    θ_i are the unscaled frequencies and L is `geometry.original_length`, in tokens. The tables are those of the model's
    own longrope block, and so is s, for both tables: its `factor`, else the trained length in units of L. The factor
    asked for plays no part. An `attention_factor` in the block wins over the formula.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor m.

    Raises:
        UnsupportedModelError: the model has no tables; see `schemes_for`.
    """
    options = geometry.options("longrope")
    table = "short_factor" if length <= geometry.original_length else "long_factor"
    if table not in options:
        raise UnsupportedModelError(f"scheme 'longrope' needs a {table} table, which this model's config does not have")
    divisors = np.asarray(options[table], dtype=np.float64)
    unscaled = geometric_series(geometry.theta, geometry.rotary_dim)
    return Frequencies(unscaled / divisors, attention_factor(geometry, options))


def attention_factor(geometry: RopeGeometry, options: Mapping[str, Any]) -> float:
    """m: the model's explicit one, else √(1 + ln s / ln L), which is 1 where nothing is stretched."""
    explicit = options.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    stretch = options.get("factor", geometry.trained_length / geometry.original_length)
    return math.sqrt(1 + math.log(stretch) / math.log(geometry.original_length)) if stretch > 1 else 1.0
