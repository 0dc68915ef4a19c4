"""The default policy: which plan a request gets, and why.

    prompt + max_tokens <= L            native: the model's own plan, for ever
    prompt < L < prompt + max_tokens    dynamic: starts native, for clients often ask for far more than they use
    prompt >= L                         static: the smallest rung covering prompt + min(max_tokens, reserve)

L is the native length. A prompt of exactly L tokens leaves a native plan no room for one more, hence the last line.
Knows lengths, the ladder and what a request may wish for. Does not know tokens, queues or what a plan costs to run.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from model_patches.geometry import RopeGeometry
from model_patches.plan import PositionPlan, make_plan
from model_patches.schemes import schemes_for
from service.errors import ContextLengthError, StartupError, WishError

Mode = Literal["native", "static", "dynamic"]
Growth = Literal["stop"]

STEPS = (1.0, 1.25, 1.5)  # rungs within each doubling
DEFAULT_STRETCH = 4  # the maximum length, in native lengths, where none is configured


@dataclass(frozen=True)
class RopeWish:
    """What a request may ask for; None leaves the choice to the server."""

    scheme: str | None = None
    mode: Mode | None = None
    factor: float | None = None
    growth: Growth | None = None


@dataclass(frozen=True)
class PlanChoice:
    """The plan chosen for one request.

    Attributes:
        plan: how the sequence is rotated, at first.
        mode: native (the model's own plan), static (covers what is expected) or dynamic (covers the length so far).
        growth: what follows when the sequence outgrows its plan.
        reason: why, in words and numbers.
        max_tokens: how many tokens may be generated before the plan or the maximum length ends it.
    """

    plan: PositionPlan
    mode: Mode
    growth: Growth
    reason: str
    max_tokens: int


def build_ladder(native_length: int, max_length: int) -> tuple[float, ...]:
    """The factors 1, 1.25, 1.5, 2, 2.5, 3, 4, ... below max_length / native_length, then exactly that ratio."""
    top = max_length / native_length
    if top <= 1:
        return (1.0,)
    doublings = range(math.ceil(math.log2(top)))
    rungs = [step * 2.0**doubling for doubling in doublings for step in STEPS]
    return (*(rung for rung in rungs if rung < top), top)


class Policy:
    """Chooses plans for one model; computes each plan once.

    Attributes:
        geometry: the model's geometry, with the native length in use.
        native_length: L, in tokens.
        max_length: the longest sequence served, prompt and generation together, in tokens.
        ladder: the factors in use, rising; the first is that of the native plan.
    """

    def __init__(
        self,
        geometry: RopeGeometry,
        *,
        native_length: int | None = None,
        max_length: int | None = None,
        scheme: str = "yarn",
        reserve: int = 2048,
        growth: str = "stop",
    ) -> None:
        """Check the settings and build the ladder.

        Args:
            geometry: the model's geometry as its config has it.
            native_length: treat this many tokens as native and original length; None keeps the config's.
            max_length: None means four times the native length, or the trained length where the config is scaled.
            scheme: the scheme of all rungs above the first.
            reserve: how many generated tokens a static plan makes room for, at most.
            growth: what a request does on outgrowing its plan.

        Raises:
            StartupError: a setting is out of range or does not go with the model.
        """
        if scheme not in schemes_for(geometry) or scheme == "default":
            raise StartupError(f"scheme must be one of {_scaling_schemes(geometry)}, it is {scheme!r}")
        if reserve < 1:
            raise StartupError(f"reserve must be at least 1 token, it is {reserve}")
        if growth != "stop":
            raise StartupError(f"growth must be 'stop', it is {growth!r}")
        self.geometry = _with_native_length(geometry, native_length)
        self.native_length = self.geometry.native_length
        self.max_length = _checked_max_length(self.geometry, max_length)
        if self.geometry.is_scaled:
            self.ladder: tuple[float, ...] = _own_ladder(self.geometry, self.max_length)
        else:
            self.ladder = build_ladder(self.native_length, self.max_length)
        self._scheme = scheme
        self._reserve = reserve
        self._plans: dict[tuple[str, float], PositionPlan] = {}

    def choose(self, prompt_tokens: int, max_tokens: int | None, wish: RopeWish | None = None) -> PlanChoice:
        """Choose the plan of one request.

        Args:
            prompt_tokens: at least 1.
            max_tokens: at least 1; None asks for all that remains below the maximum length.
            wish: what the request asks for, if anything.

        Raises:
            ContextLengthError: the request does not fit the maximum length.
            WishError: the wish is contradictory or does not fit the request; the message says what is allowed.
        """
        assert prompt_tokens >= 1
        assert max_tokens is None or max_tokens >= 1
        self._check_length(prompt_tokens, max_tokens)
        asked = max_tokens if max_tokens is not None else self.max_length - prompt_tokens
        wish = wish or RopeWish()
        factor = self._wished_factor(wish)
        mode = wish.mode or self._default_mode(prompt_tokens, asked, factor)
        if factor is None:
            factor = self._factor(mode, prompt_tokens, asked)
        self._check_covers(factor, wish, prompt_tokens)
        plan = self.plan(wish.scheme or self._scheme, factor)
        return PlanChoice(
            plan=plan,
            mode=mode,
            growth="stop",
            reason=self._reason(mode, plan, prompt_tokens, asked, wish),
            max_tokens=min(asked, plan.max_length - prompt_tokens),
        )

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes that a request may ask for."""
        return (self.geometry.scheme,) if self.geometry.is_scaled else schemes_for(self.geometry)

    def plan(self, scheme: str, factor: float) -> PositionPlan:
        """The plan of one scheme at one rung; at the first rung every scheme is the native plan."""
        if factor == self.ladder[0] or self.geometry.is_scaled:
            scheme = self.geometry.scheme
        if (scheme, factor) not in self._plans:
            self._plans[scheme, factor] = make_plan(self.geometry, scheme, factor, self.coverage(factor))
        return self._plans[scheme, factor]

    def coverage(self, factor: float) -> int:
        """How many tokens a rung of the ladder covers."""
        # The top is exact, whatever max_length / native_length was rounded to.
        return self.max_length if factor == self.ladder[-1] else math.floor(factor * self.native_length)

    def _check_length(self, prompt_tokens: int, max_tokens: int | None) -> None:
        if prompt_tokens >= self.max_length:
            message = f"the prompt has {prompt_tokens} tokens; the maximum length is {self.max_length}, "
            raise ContextLengthError(message + "of which at least one must remain to generate", param="prompt")
        if max_tokens is not None and prompt_tokens + max_tokens > self.max_length:
            message = f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together "
            message += f"{prompt_tokens + max_tokens}, above the maximum length {self.max_length}"
            raise ContextLengthError(message, param="max_tokens")

    def _wished_factor(self, wish: RopeWish) -> float | None:
        """The factor that a wish amounts to, None where it leaves the factor open; refuses contradictions."""
        self._check_available(wish)
        native = self.ladder[0]
        if wish.mode != "native" and wish.scheme != "default":
            return None if wish.factor is None else float(wish.factor)
        if wish.factor not in (None, native):
            cause = "mode native" if wish.mode == "native" else "scheme 'default'"
            message = f"{cause} goes only with factor {_exact(native)}, not with {_exact(wish.factor)}"
            raise WishError(message, param="rope.factor")
        if wish.mode == "native" and wish.scheme not in (None, "default", self.geometry.scheme):
            message = f"mode native runs the model's own scheme {self.geometry.scheme!r}, not {wish.scheme!r}; "
            raise WishError(message + "ask for mode static or dynamic, or for no scheme", param="rope.scheme")
        return native

    def _check_available(self, wish: RopeWish) -> None:
        if wish.scheme is not None and wish.scheme not in self.schemes:
            message = f"scheme {wish.scheme!r} is not available; allowed: {', '.join(self.schemes)}"
            raise WishError(message + self._own_plan_only(), param="rope.scheme")
        if wish.factor is not None and wish.factor not in self.ladder:
            message = f"factor {_exact(wish.factor)} is not available; allowed: {_listed(self.ladder)}"
            raise WishError(message + self._own_plan_only(), param="rope.factor")

    def _own_plan_only(self) -> str:
        if not self.geometry.is_scaled:
            return ""
        own = f"{self.geometry.scheme}, factor {self.geometry.factor:g}"
        return f" (the model's config is itself scaled ({own}) and its own plan is all there is)"

    def _default_mode(self, prompt_tokens: int, asked: int, factor: float | None) -> Mode:
        native = self.coverage(self.ladder[0])
        if factor is not None:
            return "native" if factor == self.ladder[0] else "static"
        if prompt_tokens + asked <= native:
            return "native"
        return "dynamic" if prompt_tokens < native else "static"

    def _factor(self, mode: Mode, prompt_tokens: int, asked: int) -> float:
        """The smallest rung that covers what the mode has to cover.

        There is one: `asked` is at most what remains below the maximum length, which the top rung covers.
        """
        ahead = min(asked, self._reserve) if mode == "static" else 1
        return next(rung for rung in self.ladder if self.coverage(rung) >= prompt_tokens + ahead)

    def _check_covers(self, factor: float, wish: RopeWish, prompt_tokens: int) -> None:
        covered = self.coverage(factor)
        if prompt_tokens < covered:
            return
        rungs = _listed(rung for rung in self.ladder if self.coverage(rung) > prompt_tokens)
        message = f"factor {_exact(factor)} covers {covered} tokens, which has no room for the prompt of "
        message += f"{prompt_tokens} tokens and one more; allowed, with a scheme that scales: factor {rungs}"
        asked_by = "factor" if wish.factor is not None else "mode" if wish.mode == "native" else "scheme"
        raise WishError(message, param=f"rope.{asked_by}")

    def _reason(self, mode: Mode, plan: PositionPlan, prompt_tokens: int, asked: int, wish: RopeWish) -> str:
        prompt, length = f"prompt of {prompt_tokens} tokens", f"the native length {self.native_length}"
        if wish.factor is not None:
            reason = f"factor {plan.factor:g} as asked covers {plan.max_length} tokens"
        elif mode == "native" and prompt_tokens + asked <= plan.max_length:
            reason = f"{prompt} + {asked} to generate fits {length}"
        elif mode == "native":
            reason = "native as asked"
        elif mode == "dynamic":
            reason = f"{prompt} + up to {asked} to generate: starts at factor {plan.factor:g}"
        else:
            ahead = min(asked, self._reserve, plan.max_length - prompt_tokens)
            relation = "exceeds" if prompt_tokens > self.native_length else "leaves no room to generate within"
            cause = f"{prompt} {relation} {length}" if prompt_tokens >= self.native_length else "static as asked"
            reason = f"{cause}: factor {plan.factor:g} covers {prompt_tokens} + {ahead} reserved"
        if wish.scheme not in (None, plan.scheme):
            reason += f"; {wish.scheme} as asked would begin beyond {length}"
        ends_early = prompt_tokens + asked > plan.max_length
        return f"{reason}; generation ends at {plan.max_length} tokens" if ends_early else reason


def _with_native_length(geometry: RopeGeometry, native_length: int | None) -> RopeGeometry:
    if native_length is None:
        return geometry
    if geometry.is_scaled:
        message = f"the native length cannot be set: the model's config is itself scaled ({geometry.scheme}, "
        raise StartupError(message + f"factor {geometry.factor:g}, native length {geometry.native_length})")
    if native_length < 1:
        raise StartupError(f"the native length must be at least 1 token, it is {native_length}")
    return replace(geometry, native_length=native_length, original_length=native_length)


def _checked_max_length(geometry: RopeGeometry, max_length: int | None) -> int:
    if max_length is None:
        max_length = geometry.trained_length if geometry.is_scaled else geometry.native_length * DEFAULT_STRETCH
    if max_length < 2:
        raise StartupError(f"the maximum length must leave room for a prompt and one more token, it is {max_length}")
    if geometry.is_scaled and max_length > geometry.trained_length:
        message = f"the maximum length {max_length} is above the trained length {geometry.trained_length} of a model "
        raise StartupError(message + f"whose config is itself scaled ({geometry.scheme}, factor {geometry.factor:g})")
    return max_length


def _own_ladder(geometry: RopeGeometry, max_length: int) -> tuple[float, ...]:
    """The rungs of a model's own plans: one, or two where LongRoPE has a long table beyond the native length."""
    if geometry.trained_length == geometry.native_length:
        return (geometry.factor,)
    return (1.0,) if max_length <= geometry.native_length else (1.0, max_length / geometry.native_length)


def _scaling_schemes(geometry: RopeGeometry) -> str:
    return ", ".join(name for name in schemes_for(geometry) if name != "default")


def _listed(factors: Iterable[float]) -> str:
    return ", ".join(map(_exact, factors))


def _exact(factor: float) -> str:
    """A factor as a request may send it back: 2, 2.5, 2.3333333333333335."""
    return repr(float(factor)).removesuffix(".0")
