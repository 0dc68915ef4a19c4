"""Positional scaling schemes: one file each, found here by name.

A scheme is a function `(geometry, factor, length) -> Frequencies`. To add one, write its file and add its line below;
or bring it in a package of its own, see `plugins`.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from model_patches.geometry import OWN_TABLES, RopeGeometry
from model_patches.schemes.clex import clex_frequencies
from model_patches.schemes.default import default_frequencies
from model_patches.schemes.dynamic import dynamic_frequencies
from model_patches.schemes.dynamic_yarn import dynamic_yarn_frequencies
from model_patches.schemes.frequencies import Frequencies, Scheme
from model_patches.schemes.linear import linear_frequencies
from model_patches.schemes.llama3 import llama3_frequencies
from model_patches.schemes.longrope import longrope_frequencies
from model_patches.schemes.ntk import ntk_frequencies
from model_patches.schemes.ntk_by_parts import ntk_by_parts_frequencies
from model_patches.schemes.plugins import discover_schemes
from model_patches.schemes.yarn import yarn_frequencies

__all__ = ["SCHEMES", "Frequencies", "Scheme", "known_schemes", "schemes_for"]

SCHEMES: dict[str, Scheme] = {  # those built in
    "default": default_frequencies,
    "linear": linear_frequencies,
    "ntk": ntk_frequencies,
    "dynamic": dynamic_frequencies,
    "ntk-by-parts": ntk_by_parts_frequencies,
    "yarn": yarn_frequencies,
    "dynamic-yarn": dynamic_yarn_frequencies,
    "llama3": llama3_frequencies,
    "longrope": longrope_frequencies,
    "clex": clex_frequencies,
}


@cache
def known_schemes() -> Mapping[str, Scheme]:
    """All schemes by name: those built in, and those of installed packages, which are looked for once.

    Raises:
        UnsupportedModelError: a package's scheme cannot be used.
    """
    return MappingProxyType(SCHEMES | discover_schemes(SCHEMES))


def schemes_for(geometry: RopeGeometry) -> tuple[str, ...]:
    """The names of the schemes that a model can run, sorted: all but those that need another model's numbers.

    Raises:
        UnsupportedModelError: a package's scheme cannot be used.
    """
    own = geometry.configured_scheme or geometry.scheme
    return tuple(sorted(known_schemes().keys() - (OWN_TABLES - {own})))
