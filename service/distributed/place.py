"""Which of a model's processes this one is. Knows the variables that torchrun sets; needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from service.errors import StartupError


@dataclass(frozen=True)
class Place:
    """One process among those that a model is split over.

    Attributes:
        rank: its number, from 0.
        local_rank: its number among those of its machine.
        size: processes in all.
        local_size: processes on its machine.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int

    @property
    def leads(self) -> bool:
        """Whether it is the one that serves."""
        return self.rank == 0


ALONE = Place(rank=0, local_rank=0, size=1, local_size=1)
"""The place of a process that has the whole model."""


def given_place(environment: Mapping[str, str], size: int) -> Place | None:
    """The place that torchrun, or whatever else started all ranks, gave to this process.

    Args:
        environment: of the process.
        size: the setting tensor_parallel.

    Returns:
        None where nobody did: then this process starts the others itself.

    Raises:
        StartupError: there are not as many processes as the setting says, or a variable is no number.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    defaults = {"LOCAL_RANK": environment["RANK"], "LOCAL_WORLD_SIZE": environment["WORLD_SIZE"]}
    numbers = {name: environment.get(name, defaults.get(name, "")) for name in names}
    for name, value in numbers.items():
        if not value.isdecimal():
            raise StartupError(f"{name} must be a whole number, it is {value!r}")
    place = Place(*(int(numbers[name]) for name in names))
    if place.size != size:
        raise StartupError(
            f"tensor_parallel is {size}, but WORLD_SIZE, the processes that were started, is {place.size}"
        )
    return place
