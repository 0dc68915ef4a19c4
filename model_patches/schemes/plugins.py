"""Schemes that other installed packages bring.

Knows entry points and what is wrong with one. Does not know which schemes are built in, nor any formula.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from model_patches.errors import UnsupportedModelError
from model_patches.schemes.frequencies import Scheme

GROUP = "ropewalk.schemes"


def discover_schemes(taken: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Import the schemes of all installed packages: one entry point each in the group `ropewalk.schemes`.

    The entry point's name is the scheme's, its value the function `(geometry, factor, length) -> Frequencies`.

    Args:
        taken: schemes whose names are not to be had.

    Raises:
        UnsupportedModelError: a package's scheme cannot be used; the message names both, and why.
    """
    found: dict[str, Scheme] = {}
    origins: dict[str, str] = {}
    for entry_point in entry_points(group=GROUP):
        if entry_point.name in taken:
            raise _unusable(entry_point, "a built-in scheme has that name")
        if entry_point.name in found:
            raise _unusable(entry_point, f"{origins[entry_point.name]} has a scheme of that name too")
        found[entry_point.name] = _load(entry_point)
        origins[entry_point.name] = _origin(entry_point)
    return found


def _load(entry_point: EntryPoint) -> Scheme:
    try:
        scheme = entry_point.load()
    except Exception as error:  # another package's code runs on import, so anything can go wrong
        raise _unusable(entry_point, f"it cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(scheme):
        raise _unusable(entry_point, f"it is not a function but {scheme!r}")
    function: Scheme = scheme
    return function


def _unusable(entry_point: EntryPoint, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"scheme {entry_point.name!r} of {_origin(entry_point)} (entry point {entry_point.value!r}) cannot be used: "
        f"{reason}; mend or uninstall that package"
    )


def _origin(entry_point: EntryPoint) -> str:
    return f"the package {entry_point.dist.name!r}" if entry_point.dist else "an unnamed package"
