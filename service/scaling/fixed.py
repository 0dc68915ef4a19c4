"""The policy for models whose positions no scheme can scale: one plan for all requests, up to the maximum length.

That is the native length for positions that were learned, which have an end there, and where the config says nothing
else for sinusoidal ones; ALiBi, made to be run beyond it, has four native lengths. What is chosen is told in the same
words as by `service.scaling.policy`. Knows lengths and what a request may wish for.
"""

from typing import Any

from model_patches.encoding import WHAT_THEY_ARE, FixedEncoding
from service.errors import WishError
from service.scaling.ladder import DEFAULT_STRETCH, Rung
from service.scaling.options import OptionError, RopePolicy
from service.scaling.policy import PlanChoice, Policy
from service.scaling.refusals import check_allowed, check_length
from service.scaling.wish import RopeWish

INDEPENDENT = frozenset({"max_length", "native_length", "requests_may_choose"})
"""Options that say nothing about scaling."""


class FixedPolicy:
    """Gives every request the same plan.

    Attributes:
        encoding: the model's, with the native length in use.
        options: the operator's.
        native_length: L, in tokens.
        max_length: the longest sequence served, prompt and generation together, in tokens.
        rungs: the one that there is.
        ladder: its factor, 1.
        schemes: the name of what the positions are.
        growth_refresh_tokens: 0.
    """

    growth_refresh_tokens = 0

    def __init__(self, encoding: FixedEncoding, options: RopePolicy | None = None, **given: Any) -> None:
        """
        Args:
            encoding: as the model's config has it.
            options: the operator's; None for those `given`, by name, and the defaults of the rest.
            **given: fields of `RopePolicy`.

        Raises:
            OptionError: an option does not go with the model.
        """
        assert options is None or not given
        self.options = RopePolicy(**given) if options is None else options
        self.encoding = encoding
        self.schemes = (encoding.kind,)
        self._settled = {
            **{"scheme": encoding.kind, "mode": "native", "factor": 1.0},
            **{"growth": "stop", "prefix_reuse": "same-plan"},
        }
        _check_options(self.options, self._settled, self.why)
        self.native_length, self.max_length = _lengths(encoding, self.options, self.why)
        self.rungs = (Rung(1.0, encoding.kind, self.max_length),)
        self.ladder = (1.0,)
        self._plan = encoding.plan(self.max_length)

    @property
    def positions(self) -> FixedEncoding:
        """How the model knows positions."""
        return self.encoding

    @property
    def why(self) -> str:
        """Why there is nothing to choose, in words."""
        return f"this model's positions are {self.encoding.kind}: {WHAT_THEY_ARE[self.encoding.kind]}"

    def choose(self, prompt_tokens: int, max_tokens: int | None, wish: RopeWish | None = None) -> PlanChoice:
        """The plan, and how far beyond the model's training the request may run under it.

        Args and errors as for `Policy.choose`.
        """
        assert prompt_tokens >= 1
        assert max_tokens is None or max_tokens >= 1
        check_length(prompt_tokens, max_tokens, self.max_length, self.why if self.encoding.has_end else None)
        asked = max_tokens if max_tokens is not None else self.max_length - prompt_tokens
        self._check_wish(wish or RopeWish())
        return PlanChoice(
            rungs=(self._plan,),
            mode="native",
            growth="stop",
            prefix_reuse="same-plan",
            reason=self._reason(prompt_tokens, asked),
            max_tokens=asked,
        )

    def _check_wish(self, wish: RopeWish) -> None:
        check_allowed(wish, self.options)
        for name in wish.asked_for:
            wished, settled = getattr(wish, name), self._settled[name]
            if wished != settled:
                shown = f"{wished:g}" if isinstance(wished, float) else repr(wished)
                allowed = f"{settled:g}" if isinstance(settled, float) else settled
                message = f"{name} {shown} is not available; allowed: {allowed} ({self.why})"
                raise WishError(message, param=f"rope.{name}")

    def _reason(self, prompt_tokens: int, asked: int) -> str:
        said = f"{self.encoding.kind} positions, never scaled: prompt of {prompt_tokens} tokens + "
        total, native = prompt_tokens + asked, self.native_length
        if total <= native:
            return f"{said}{asked} to generate fits the native length {native}"
        return f"{said}up to {asked} to generate reaches {total / native:.2f} times the native length {native}"


AnyPolicy = Policy | FixedPolicy


def _check_options(options: RopePolicy, settled: dict[str, Any], why: str) -> None:
    for name in RopePolicy.model_fields:
        if name not in options.model_fields_set - INDEPENDENT:
            continue
        value = getattr(options, name)
        if value and value != settled.get(name):
            shown = "" if isinstance(value, tuple) else f" {value}"
            raise OptionError(f"{name}{shown} does not go with this model: {why}", name)


def _lengths(encoding: FixedEncoding, options: RopePolicy, why: str) -> tuple[int, int]:
    """The native and the maximum length."""
    native = encoding.native_length if options.native_length is None else options.native_length
    if encoding.has_end and native > encoding.native_length:
        message = f"the native length {native} is above the {encoding.native_length} positions that there are: {why}"
        raise OptionError(message, "native_length")
    longest = options.max_length
    if longest is None:
        return native, native * DEFAULT_STRETCH if encoding.kind == "alibi" else native
    if encoding.has_end and longest > native:
        raise OptionError(f"the maximum length {longest} is above the native length {native}: {why}", "max_length")
    return native, longest
