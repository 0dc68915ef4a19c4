"""The policy's options: what an operator may steer, and the limits that need no model to check.

Knows names, types and limits. Does not know where a value was written, or which of them a model can have.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator

from service.errors import StartupError
from service.scaling.wish import Growth, Mode, PrefixReuse, WishField

NativeRope = Literal["config", "unscaled"]
WISH_FIELDS: tuple[WishField, ...] = get_args(WishField)


class OptionError(StartupError):
    """An option does not go with the model, or with another option.

    Args:
        message: says what is wrong, with the values.
        options: the names of the options that have a part in it.
    """

    def __init__(self, message: str, *options: str) -> None:
        super().__init__(message)
        self.options = options


class OptionsModel(BaseModel):
    """The options, or a part of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)


MOST_STRETCHED = 10_000  # factor; far beyond any use
LONGEST = 2**31 - 1  # tokens


class RungOptions(OptionsModel):
    """A rung above the native one; without a scheme it has the ladder's."""

    factor: float = Field(gt=1, le=MOST_STRETCHED, allow_inf_nan=False)
    scheme: str | None = None


class ModeRule(OptionsModel):
    """The mode of prompts up to so many tokens, or of any length, that no rule before it has decided."""

    mode: Mode
    prompt_tokens: StrictInt | None = Field(default=None, ge=1)


def check_rising(name: str, numbers: Sequence[float]) -> None:
    """Raise ValueError unless each number is above the one before."""
    for before, after in pairwise(numbers):
        if after <= before:
            raise ValueError(f"{name} must rise, {after:g} follows {before:g}")


def _listed_rungs(value: Any) -> Any:
    """Rungs out of "1.25, 2, 4" or [1.25, {factor: 2, scheme: ntk}]."""
    if isinstance(value, str):
        return [{"factor": part.strip()} for part in value.split(",")]
    if isinstance(value, int | float):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return [
        {"factor": rung} if isinstance(rung, int | float) and not isinstance(rung, bool) else rung for rung in value
    ]


def _rising_rungs(rungs: tuple[RungOptions, ...]) -> tuple[RungOptions, ...]:
    check_rising("factors", [rung.factor for rung in rungs])
    return rungs


def _listed_wishes(value: Any) -> Any:
    """Fields of a wish out of true, false, "scheme, factor" or [scheme, factor]."""
    value = {"true": True, "false": False}.get(value.strip().lower(), value) if isinstance(value, str) else value
    if isinstance(value, bool):
        return WISH_FIELDS if value else ()
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Ladder = Annotated[
    tuple[RungOptions, ...], Field(min_length=1), BeforeValidator(_listed_rungs), AfterValidator(_rising_rungs)
]
Wishes = Annotated[tuple[WishField, ...], BeforeValidator(_listed_wishes)]


class RopePolicy(OptionsModel):
    """The options of the policy; None leaves a choice to the model's geometry.

    Attributes:
        scheme: of every rung above the first that names none; None: what the config's block asks for, else yarn.
        ladder: the rungs above the native one, rising; None: 1.25, 1.5, 2, 2.5, 3, 4, 5, ... up to the maximum length.
        max_length: prompt and generation together, in tokens; None: as far as a given ladder reaches, else as the
            config's scaling, else four native lengths.
        native_length: tokens to treat as native and original length; None: the config's.
        native_rope: whether a scaling block in the config is the model's own plan (`config`) or a ceiling for those who
            need it (`unscaled`); None: decided from the model.
        reserve: generated tokens that a static plan makes room for, at most.
        growth: what a request does on outgrowing its plan.
        growth_refresh_tokens: how many of the latest tokens are computed anew after a re-rotation.
        prefix_reuse: whose cached prefixes a request may use.
        mode: by the prompt's length; empty: the default rule.
        requests_may_choose: the fields of a wish that requests may set.
    """

    scheme: str | None = None
    ladder: Ladder | None = None
    max_length: StrictInt | None = Field(default=None, ge=2, le=LONGEST)
    native_length: StrictInt | None = Field(default=None, ge=2, le=LONGEST)
    native_rope: NativeRope | None = None
    reserve: StrictInt = Field(default=2048, ge=1)
    growth: Growth = "rerotate"
    growth_refresh_tokens: StrictInt = Field(default=0, ge=0)
    prefix_reuse: PrefixReuse = "same-plan"
    mode: tuple[ModeRule, ...] = ()
    requests_may_choose: Wishes = WISH_FIELDS

    @model_validator(mode="after")
    def _modes_cover_every_prompt(self) -> Self:
        limits = [rule.prompt_tokens for rule in self.mode]
        numbers = [limit for limit in limits if limit is not None]
        if self.mode and [*numbers, None] != limits:
            raise ValueError("mode: every entry but the last needs prompt_tokens, and the last must have none")
        check_rising("mode: prompt_tokens", numbers)
        return self
