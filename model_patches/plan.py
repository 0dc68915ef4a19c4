"""The positional plan: one scheme at one factor, frozen.

Knows the numbers that rotate a sequence, and which can. Does not know which request uses them or why; that is
`service.scaling`.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.schemes import known_schemes


@dataclass(frozen=True)
class PositionPlan:
    """How every token of a sequence is rotated.

    Plans are equal when they rotate alike, whatever they are called and however far they reach: what one cached, the
    other can use.

    Attributes:
        scheme: a key of `model_patches.schemes.known_schemes()`.
        factor: s, how far the original length is stretched; 1.0 is unscaled.
        max_length: the longest sequence, in tokens, that the plan covers.
        inv_freq: inverse frequencies in radians per position, float64, one for each pair; length rotary_dim / 2.
        attention_factor: m, multiplied into cos and sin of both q and k.
    """

    scheme: str = field(compare=False)
    factor: float = field(compare=False)
    max_length: int = field(compare=False)
    inv_freq: tuple[float, ...]
    attention_factor: float

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, for a plan is part of the key of every cached page."""
        return hash((self.inv_freq, self.attention_factor))

    @cached_property
    def fingerprint(self) -> str:
        """What tells plans that rotate differently apart, whatever they are called; the same in every process."""
        numbers = ",".join(map(repr, (*self.inv_freq, self.attention_factor)))
        return hashlib.sha256(numbers.encode()).hexdigest()[:16]


def make_plan(geometry: RopeGeometry, scheme: str, factor: float, max_length: int) -> PositionPlan:
    """Compute the plan of one scheme at one factor.

    Args:
        geometry: the model's rotary geometry.
        scheme: a key of `known_schemes()`; KeyError otherwise.
        factor: s >= 1.
        max_length: the longest sequence the plan has to cover, in tokens.

    Raises:
        UnsupportedModelError: the scheme lacks numbers that this model does not have, or it returned something that
            cannot rotate: its code may be another package's, and its numbers any config's.
    """
    returned = known_schemes()[scheme](geometry, factor, max_length)
    inv_freq, attention_factor = _checked(scheme, returned, geometry.rotary_dim // 2)
    return PositionPlan(
        scheme=scheme,
        factor=factor,
        max_length=max_length,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=attention_factor,
    )


def _checked(scheme: str, returned: Any, pairs: int) -> tuple[NDArray[np.float64], float]:
    try:
        inv_freq, attention_factor = returned
    except (TypeError, ValueError) as error:
        raise _refusal(scheme, f"{returned!r} instead of inverse frequencies and an attention factor") from error
    frequencies = _float64(inv_freq)
    if frequencies is None:
        raise _refusal(scheme, f"the inverse frequencies {inv_freq!r}, which are not real numbers")
    if frequencies.shape != (pairs,):
        raise _refusal(scheme, f"inverse frequencies of shape {frequencies.shape}, not one for each of {pairs} pairs")
    wrong = [(pair, value) for pair, value in enumerate(frequencies.tolist()) if not 0 < value < np.inf]
    if wrong:
        pair, value = wrong[0]
        raise _refusal(scheme, f"the inverse frequency {value} for pair {pair}; it must be finite and above 0")
    factor = _float64(attention_factor)
    if factor is None:
        raise _refusal(scheme, f"the attention factor {attention_factor!r}, which is not a real number")
    if factor.shape != () or not 0 < factor < np.inf:
        raise _refusal(scheme, f"the attention factor {attention_factor!r}; it must be one number, finite and above 0")
    return frequencies, float(factor)


def _float64(value: Any) -> NDArray[np.float64] | None:
    """None for what NumPy cannot read, and for text and complex numbers, which it would convert."""
    try:
        return np.asarray(value).astype(np.float64, casting="same_kind")
    except (TypeError, ValueError, RuntimeError):  # the last from tensors that require gradients
        return None


def _refusal(scheme: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"scheme {scheme!r} returned {what}")
