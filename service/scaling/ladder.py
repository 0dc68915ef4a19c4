"""The ladder: the few factors that a server stretches by, and how far each of them reaches.

Knows a model's lengths and the operator's options. Does not know requests.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, repeat, takewhile

from model_patches.geometry import RopeGeometry
from model_patches.schemes import schemes_for
from service.scaling.options import OptionError, RopePolicy
from service.suggest import did_you_mean

STEPS = (1.0, 1.25, 1.5)  # rungs within each doubling
DEFAULT_STRETCH = 4  # the maximum length, in native lengths, where nothing says more
DEFAULT_SCHEME = "yarn"


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        factor: how far the original length is stretched.
        scheme: by which rule, unless a request asks for another.
        covers: the longest sequence, in tokens.
    """

    factor: float
    scheme: str
    covers: int


def build_ladder(geometry: RopeGeometry, options: RopePolicy) -> tuple[Rung, ...]:
    """The rungs that a model can have, rising; the first is its native plan, the last covers the maximum length.

    Args:
        geometry: with the native length in use.
        options: the operator's.

    Raises:
        OptionError: an option does not go with the model or with another option.
    """
    if geometry.is_scaled:
        return _own_ladder(geometry, options)
    scheme = _scaling_scheme(geometry, options.scheme or geometry.configured_scheme or DEFAULT_SCHEME, "scheme")
    schemes = [
        _scaling_scheme(geometry, rung.scheme or scheme, f"ladder, factor {rung.factor:g}: scheme")
        for rung in options.ladder or ()
    ]
    max_length, top = _top(geometry, options)
    native = geometry.native_length
    rungs = [Rung(1.0, geometry.scheme, min(native, max_length))]
    factors = [rung.factor for rung in options.ladder or ()] or _default_factors()
    for factor, own in zip(factors, schemes or repeat(scheme), strict=False):
        if rungs[-1].covers == max_length:
            break
        covers = _covered(factor, native)
        if covers >= max_length:  # exact, whatever the ratio is rounded to
            rungs.append(Rung(top, own, max_length))
        elif covers > rungs[-1].covers:
            rungs.append(Rung(factor, own, covers))
        elif options.ladder is not None:
            message = f"ladder: factor {factor:g} covers {covers} tokens, as factor {rungs[-1].factor:g} before it does"
            raise OptionError(f"{message}: leave one of them out", "ladder", "native_length")
    return tuple(rungs)


def with_native_length(geometry: RopeGeometry, native_length: int | None) -> RopeGeometry:
    """The geometry with another native and original length; a ceiling comes down with it.

    Raises:
        OptionError: the model's own plan is scaled, so that its lengths are what they are.
    """
    if native_length is None:
        return geometry
    if geometry.is_scaled:
        message = f"the native length {native_length} cannot be set: {itself_scaled(geometry)}, "
        raise OptionError(message + f"native length {geometry.native_length}", "native_length", "native_rope")
    ceiling = geometry.ceiling
    if ceiling is not None:
        stretched = round(ceiling / geometry.original_length * native_length)
        ceiling = max(native_length, min(ceiling, stretched))
    return replace(geometry, native_length=native_length, original_length=native_length, ceiling=ceiling)


def itself_scaled(geometry: RopeGeometry) -> str:
    """Why a model's plan is not the operator's choice."""
    return f"the model's config is itself scaled ({geometry.scheme}, factor {geometry.factor:g})"


def _own_ladder(geometry: RopeGeometry, options: RopePolicy) -> tuple[Rung, ...]:
    """The rungs of a model's own plans: one, or two where the config's scaling reaches beyond the native length; with
    clex, whose plans are as many as the native length fits into the trained one, some of them."""
    if options.ladder is not None or options.scheme not in (None, geometry.scheme):
        unfit = "a ladder" if options.ladder is not None else f"scheme {options.scheme!r}"
        message = f"{unfit} cannot be set: {itself_scaled(geometry)} and its own plan is all there is; "
        message += "native_rope unscaled would keep that plan for longer requests"
        raise OptionError(message, "ladder", "scheme", "native_rope")
    trained, native, scheme = geometry.trained_length, geometry.native_length, geometry.scheme
    max_length = trained if options.max_length is None else options.max_length
    if max_length > trained:
        message = f"the maximum length {max_length} is above the trained length {trained} of the model: "
        raise OptionError(message + itself_scaled(geometry), "max_length", "native_rope")
    if scheme == "clex":
        return _whole_rungs(geometry, max_length)
    if trained == native:
        return (Rung(geometry.factor, scheme, max_length),)
    if max_length <= native:
        return (Rung(1.0, scheme, max_length),)
    return Rung(1.0, scheme, native), Rung(max_length / native, scheme, max_length)


def _whole_rungs(geometry: RopeGeometry, max_length: int) -> tuple[Rung, ...]:
    """The default ladder's whole factors, the first 1 and the last the multiple of the native length that has room for
    the maximum one: 1, 2, 3, 4, 5, 6, 8, 10, 12, 16."""
    native, top = geometry.native_length, float(math.ceil(max_length / geometry.native_length))
    below = takewhile(lambda factor: factor < top, chain([1.0], _default_factors()))
    factors = [*(factor for factor in below if factor.is_integer()), top]
    return tuple(Rung(factor, geometry.scheme, min(round(factor * native), max_length)) for factor in factors)


def _top(geometry: RopeGeometry, options: RopePolicy) -> tuple[int, float]:
    """The maximum length and the factor that covers it."""
    native, max_length = geometry.native_length, options.max_length
    if options.ladder is None:
        max_length = max_length or geometry.ceiling or native * DEFAULT_STRETCH
        return max_length, max_length / native
    top = options.ladder[-1].factor
    reach = _covered(top, native)
    if max_length is None:
        return reach, top
    if reach < max_length:
        message = (
            f"the maximum length {max_length} is above the {reach} tokens that the ladder reaches: its top, factor "
        )
        message += f"{top:g}, times the native length {native}"
        raise OptionError(message, "max_length", "ladder", "native_length")
    return max_length, max_length / native


def _covered(factor: float, native_length: int) -> int:
    """Tokens that a factor covers: 1.15 × 100 is 115, though the nearest binary fractions give a little less."""
    return math.floor(round(factor * native_length, 6))


def _scaling_scheme(geometry: RopeGeometry, scheme: str, place: str) -> str:
    allowed = [name for name in schemes_for(geometry) if name != "default"]
    if scheme not in allowed:
        guess = did_you_mean(scheme, allowed)
        message = f"{place} must be one of {', '.join(allowed)}, it is {scheme!r}{guess}"
        raise OptionError(message, place.partition(",")[0])
    return scheme


def _default_factors() -> Iterator[float]:
    """1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, ... without an end."""
    return (step * 2.0**doubling for doubling in count() for step in STEPS if step * 2.0**doubling > 1)
