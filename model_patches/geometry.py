"""The rotary geometry of a model. Knows what schemes need; does not know where it was read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Layout = Literal["half", "interleaved"]
OWN_TABLES = frozenset({"longrope", "clex"})  # schemes whose models have plans of their own for every length


@dataclass(frozen=True)
class LocalRope:
    """The rotary parameters of layers that see a window only, where these have their own: such layers are never scaled,
    for no distance within a window is longer than the model was trained on.

    Attributes:
        layer_types: the names in the config's `layer_types` of the layers that it holds for.
        theta: base of their inverse frequencies.
        rotary_dim: how many of a head's dimensions they rotate.
    """

    layer_types: tuple[str, ...]
    theta: float
    rotary_dim: int


@dataclass(frozen=True)
class RopeGeometry:
    """What positional scaling needs to know of a model; where layers differ, of those that see everything.

    Attributes:
        rotary_dim: d, how many of a head's dimensions are rotated.
        theta: b, the base of the inverse frequencies (`rope_theta`).
        original_length: L in the schemes' formulas, in tokens (`original_max_position_embeddings` where given).
        native_length: the context the model was trained to use, in tokens, which the policy compares with; with
            longrope that of its short table, and with clex that of t = 1, both of which are the original length.
        scheme: the scheme of the model's native plan; "default" where that is unscaled.
        factor: how far that scheme stretches the original length to cover the native one, or with longrope and clex
            all that was trained; 1.0 where it does not.
        parameters: options of the scheme that the config asks for, under transformers' names (`beta_fast`, `truncate`).
        configured_scheme: the scheme that `parameters` belong to, where that is not the native plan's: see `unscaled`.
        ceiling: the longest sequence that the config's own scaling covers, where the native plan is without it.
        layout: which two of a cached key's dimensions are rotated together: i and i + d/2, or 2i and 2i + 1.
        local: of layers with rotary parameters of their own, None where all layers are alike.
    """

    rotary_dim: int
    theta: float
    original_length: int
    native_length: int
    scheme: str = "default"
    factor: float = 1.0
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    configured_scheme: str | None = None
    ceiling: int | None = None
    layout: Layout = "half"
    local: LocalRope | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether the model's own plan is itself stretched, so that it must not be stretched again."""
        return self.factor != 1.0 or self.native_length != self.original_length or self.scheme in OWN_TABLES

    @property
    def trained_length(self) -> int:
        """The longest sequence, in tokens, that the config covers: the native length, unless a scaling block that the
        native plan does without covers more, or plans beyond the native one do (longrope, clex)."""
        if self.scheme in OWN_TABLES:
            return round(self.factor * self.original_length)
        return self.ceiling or self.native_length

    def options(self, scheme: str) -> Mapping[str, Any]:
        """The config's options for `scheme`: empty where the config asks for another scheme.

        An `attention_factor` fitted to a model's own YaRN says nothing about another scheme that a request asks for.
        """
        return self.parameters if scheme == (self.configured_scheme or self.scheme) else {}

    def unscaled(self) -> "RopeGeometry":
        """The same model, its scaling block not a floor but a ceiling: native plans are unscaled, up to the original
        length, and whoever needs more is scaled with the block's options."""
        return replace(
            self,
            scheme="default",
            factor=1.0,
            native_length=self.original_length,
            configured_scheme=self.scheme,
            ceiling=self.trained_length,
        )
