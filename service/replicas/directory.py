"""Which replicas there are, as the router of this process has last heard. Ray makes the router by itself, where nothing
can be handed to it; so what it knows and others need is left here."""

from collections.abc import Sequence

_names: Sequence[str] = ()


def tell(names: Sequence[str]) -> None:
    """Called by the router whenever there are others."""
    global _names
    _names = tuple(names)


def names() -> Sequence[str]:
    """Of the replicas that run."""
    return _names
