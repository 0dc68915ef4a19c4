"""What a request may ask of the policy, and the words for it. Knows no lengths, models or plans."""

from dataclasses import dataclass, fields
from typing import Literal

Mode = Literal["native", "static", "dynamic"]
Growth = Literal["rerotate", "reprefill", "stop"]
PrefixReuse = Literal["same-plan", "rerotate"]
WishField = Literal["scheme", "mode", "factor", "growth", "prefix_reuse"]


@dataclass(frozen=True)
class RopeWish:
    """What a request may ask for; None leaves the choice to the server."""

    scheme: str | None = None
    mode: Mode | None = None
    factor: float | None = None
    growth: Growth | None = None
    prefix_reuse: PrefixReuse | None = None

    @property
    def asked_for(self) -> tuple[str, ...]:
        """The names of the fields that say something."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def is_unscaled_for_ever(self) -> bool:
        """Whether it rules out every plan but the native one."""
        return self.mode == "native" or self.scheme == "default"
