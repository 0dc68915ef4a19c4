"""Dynamic YaRN: YaRN whose stretch follows the length of the sequence.

Knows how a length becomes a stretch; what to do with one is `yarn`'s. Does not know how a length changes while a
sequence grows.
"""

from model_patches.geometry import RopeGeometry
from model_patches.schemes.frequencies import Frequencies
from model_patches.schemes.ntk_by_parts import stretched_by_parts
from model_patches.schemes.yarn import attention_factor


def dynamic_yarn_frequencies(geometry: RopeGeometry, _factor: float, length: int) -> Frequencies:
    """YaRN at s = max(1, l/L), in the frequencies and in m ("Dynamic Scaling", YaRN 2309.00071, section 3.3).

    l is `length` and L is `geometry.original_length`, both in tokens. The options are `yarn`'s, out of the model's own
    dynamic-yarn block; a model without one gets the defaults. The factor asked for plays no part: the length alone says
    how far to stretch.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor m.
    """
    options = geometry.options("dynamic-yarn")
    stretch = max(1.0, length / geometry.original_length)
    return Frequencies(stretched_by_parts(geometry, stretch, options), attention_factor(stretch, options))
