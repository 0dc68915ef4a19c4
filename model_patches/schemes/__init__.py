"""Positional scaling schemes: one file each, found here by name.

A scheme is a function `(geometry, factor, length) -> Frequencies`. To add one, write its file and add its line below.
"""

from model_patches.geometry import RopeGeometry
from model_patches.schemes.default import default_frequencies
from model_patches.schemes.dynamic import dynamic_frequencies
from model_patches.schemes.frequencies import Frequencies, Scheme
from model_patches.schemes.linear import linear_frequencies
from model_patches.schemes.llama3 import llama3_frequencies
from model_patches.schemes.longrope import longrope_frequencies
from model_patches.schemes.ntk import ntk_frequencies
from model_patches.schemes.ntk_by_parts import ntk_by_parts_frequencies
from model_patches.schemes.yarn import yarn_frequencies

__all__ = ["SCHEMES", "Frequencies", "Scheme", "schemes_for"]

SCHEMES: dict[str, Scheme] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "ntk": ntk_frequencies,
    "dynamic": dynamic_frequencies,
    "ntk-by-parts": ntk_by_parts_frequencies,
    "yarn": yarn_frequencies,
    "llama3": llama3_frequencies,
    "longrope": longrope_frequencies,
}
OWN_ONLY = frozenset({"longrope"})  # needs numbers that only a config asking for this very scheme has


def schemes_for(geometry: RopeGeometry) -> tuple[str, ...]:
    """The names of the schemes that a model can run, sorted: all but those whose numbers its config does not have."""
    return tuple(sorted(SCHEMES.keys() - (OWN_ONLY - {geometry.scheme})))
