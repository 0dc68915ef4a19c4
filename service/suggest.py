"""Which known name was probably meant by an unknown one. Knows spelling; does not know what the names are for."""

import difflib
from collections.abc import Iterable

NEAR = 0.7  # difflib's ratio, 1 for equal names; two letters swapped in a name of four are 0.75
LONGEST = 100  # characters; no name of ours comes near


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of a message about an unknown name: `: did you mean max_tokens?`, or nothing where no known one is near.

    Case does not matter to what is near, nor does `-` for `_`.

    Args:
        name: as it was written, without the prefix.
        known: the names to choose from, without the prefix.
        prefix: what is said before the name that was found.
    """
    by_spelling = {_spelling(other): other for other in known}
    near = difflib.get_close_matches(_spelling(name), by_spelling, n=1, cutoff=NEAR) if len(name) <= LONGEST else []
    return f": did you mean {prefix}{by_spelling[near[0]]}?" if near else ""


def _spelling(name: str) -> str:
    return name.lower().replace("-", "_")
