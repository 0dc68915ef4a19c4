"""The rotary geometry of a model. Knows what schemes need; does not know where it was read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeGeometry:
    """What positional scaling needs to know of a model.

    Attributes:
        rotary_dim: d, how many of a head's dimensions are rotated.
        theta: b, the base of the inverse frequencies (`rope_theta`).
        original_length: L in the schemes' formulas, in tokens (`original_max_position_embeddings` where given).
        native_length: the context the model was trained to use, in tokens, which the policy compares with; with
            longrope that of its short table, which is the original length.
        scheme: the scheme that the config itself asks for; "default" where it asks for none.
        factor: how far that scheme stretches the original length to cover the native one, or with longrope all that
            its long table covers; 1.0 where it does not.
        parameters: that scheme's own options under transformers' names (`beta_fast`, `truncate`, `mscale`, ...).
    """

    rotary_dim: int
    theta: float
    original_length: int
    native_length: int
    scheme: str = "default"
    factor: float = 1.0
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def is_scaled(self) -> bool:
        """Whether the model's own plan is itself stretched, so that it must not be stretched again."""
        return self.factor != 1.0 or self.native_length != self.original_length or self.scheme == "longrope"

    @property
    def trained_length(self) -> int:
        """The longest sequence, in tokens, that the model's own plans cover: longrope has a second one, for long ones.

        That is the native length for every other scheme.
        """
        return round(self.factor * self.original_length) if self.scheme == "longrope" else self.native_length

    def options(self, scheme: str) -> Mapping[str, Any]:
        """The config's options for `scheme`: empty where the config asks for another scheme.

        An `attention_factor` fitted to a model's own YaRN says nothing about another scheme that a request asks for.
        """
        return self.parameters if scheme == self.scheme else {}
