"""Positional scaling schemes: one file each, found here by name.

A scheme is a function `(geometry, factor, length) -> Frequencies`. To add one, write its file and add its line below.
"""

from model_patches.schemes.default import default_frequencies
from model_patches.schemes.dynamic import dynamic_frequencies
from model_patches.schemes.frequencies import Frequencies, Scheme
from model_patches.schemes.linear import linear_frequencies
from model_patches.schemes.llama3 import llama3_frequencies
from model_patches.schemes.ntk import ntk_frequencies
from model_patches.schemes.yarn import yarn_frequencies

__all__ = ["SCHEMES", "Frequencies", "Scheme"]

SCHEMES: dict[str, Scheme] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "ntk": ntk_frequencies,
    "dynamic": dynamic_frequencies,
    "yarn": yarn_frequencies,
    "llama3": llama3_frequencies,
}
