"""The policy: which plan a request gets, and why. By default:

    prompt + max_tokens <= L             native: the model's own plan, for ever
    prompt <= L < prompt + max_tokens    dynamic: starts native, for clients often ask for far more than they use
    prompt > L                           static: the smallest rung covering prompt + min(max_tokens, reserve)

L is the native length. A sequence that outgrows its plan moves to the next rung, unless growth is `stop`: then a prompt
of exactly L tokens is static too, for its native plan would have no room for one more.
Knows lengths, the ladder and what a request may wish for. Does not know tokens, queues or what a plan costs to run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.plan import PositionPlan, make_plan
from model_patches.schemes import schemes_for
from service.errors import WishError
from service.scaling.ladder import Rung, build_ladder, with_native_length
from service.scaling.options import ModeRule, OptionError, RopePolicy
from service.scaling.reasons import reason
from service.scaling.refusals import check_length, check_wish, exact, listed
from service.scaling.wish import Growth, Mode, PrefixReuse, RopeWish

__all__ = ["Growth", "Mode", "PlanChoice", "Policy", "PrefixReuse", "RopeWish"]


@dataclass(frozen=True)
class PlanChoice:
    """The plans chosen for one request.

    Attributes:
        rungs: the plan that the sequence starts under, then those that it grows through, in order, each reaching
            further and rotating differently; just one where it never grows.
        mode: native (the model's own plan), static (covers what is expected) or dynamic (covers the length so far).
        growth: what follows when the sequence outgrows a plan.
        prefix_reuse: whose cached prefixes it may use.
        reason: why, in words and numbers.
        max_tokens: how many tokens may be generated before the last plan ends it.
    """

    rungs: tuple[PositionPlan, ...]
    mode: Mode
    growth: Growth
    prefix_reuse: PrefixReuse
    reason: str
    max_tokens: int

    @property
    def plan(self) -> PositionPlan:
        """The plan that the sequence starts under."""
        return self.rungs[0]


class Policy:
    """Chooses plans for one model; computes each plan once.

    Attributes:
        geometry: the model's geometry, with the native length in use.
        options: the operator's.
        native_length: L, in tokens.
        max_length: the longest sequence served, prompt and generation together, in tokens.
        rungs: the ladder, rising; the first is the native plan.
        ladder: the factors of the rungs.
        growth_refresh_tokens: how many of the latest tokens are computed anew after a re-rotation.
    """

    def __init__(self, geometry: RopeGeometry, options: RopePolicy | None = None, **given: Any) -> None:
        """Check the options against the model, build the ladder and compute the plans of its rungs.

        Args:
            geometry: the model's geometry as its config has it.
            options: the operator's; None for those `given`, by name, and the defaults of the rest.
            **given: fields of `RopePolicy`.

        Raises:
            OptionError: an option does not go with the model, or a rung's scheme cannot be computed for it.
        """
        assert options is None or not given
        self.options = RopePolicy(**given) if options is None else options
        self.geometry = with_native_length(geometry, self.options.native_length)
        self.native_length = self.geometry.native_length
        self.rungs = build_ladder(self.geometry, self.options)
        self.ladder = tuple(rung.factor for rung in self.rungs)
        self.max_length = self.rungs[-1].covers
        self.growth_refresh_tokens = self.options.growth_refresh_tokens
        self._plans: dict[tuple[str, Rung], PositionPlan] = {}
        _check_native_rules(self.options.mode, self.native_length)
        for rung in self.rungs:
            self._ensure_computable(rung)

    @property
    def positions(self) -> RopeGeometry:
        """How the model knows positions."""
        return self.geometry

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes that a request may ask for."""
        return (self.geometry.scheme,) if self.geometry.is_scaled else schemes_for(self.geometry)

    def coverage(self, factor: float) -> int:
        """How many tokens a rung of the ladder covers."""
        return self.rungs[self.ladder.index(factor)].covers

    def plan(self, scheme: str | None, rung: Rung) -> PositionPlan:
        """The plan of a rung under a scheme, None for its own; the first rung is the native plan under any.

        Raises:
            WishError: the scheme cannot be computed for this model.
        """
        if scheme is None or rung is self.rungs[0] or self.geometry.is_scaled:
            scheme = rung.scheme
        if (scheme, rung) not in self._plans:
            try:
                self._plans[scheme, rung] = make_plan(self.geometry, scheme, rung.factor, rung.covers)
            except UnsupportedModelError as error:
                raise WishError(f"{error} (factor {exact(rung.factor)})", param="rope.scheme") from error
        return self._plans[scheme, rung]

    def _ensure_computable(self, rung: Rung) -> None:
        """Refuse to start with a plan that the first request to need it would find wanting."""
        try:
            self.plan(None, rung)
        except WishError as error:
            raise OptionError(error.message, "scheme", "ladder") from error

    def choose(self, prompt_tokens: int, max_tokens: int | None, wish: RopeWish | None = None) -> PlanChoice:
        """Choose the plans of one request.

        Args:
            prompt_tokens: at least 1.
            max_tokens: at least 1; None asks for all that remains below the maximum length.
            wish: what the request asks for, if anything.

        Raises:
            ContextLengthError: the request does not fit the maximum length.
            WishError: the wish is not allowed, contradictory or does not fit the request; the message says what is.
        """
        assert prompt_tokens >= 1
        assert max_tokens is None or max_tokens >= 1
        check_length(prompt_tokens, max_tokens, self.max_length)
        asked = max_tokens if max_tokens is not None else self.max_length - prompt_tokens
        wish = wish or RopeWish()
        check_wish(wish, self.options, self.schemes, self.ladder, self.geometry)
        rule = self._rule(prompt_tokens, wish)
        mode = self._mode(prompt_tokens, asked, wish, rule)
        growth = self._growth(mode, wish)
        start = self._start(mode, growth, prompt_tokens, asked, wish)
        grows = growth != "stop" and mode != "native"
        rungs = self._path(self.rungs[start:] if grows else self.rungs[start : start + 1], wish.scheme)
        return PlanChoice(
            rungs=rungs,
            mode=mode,
            growth=growth,
            prefix_reuse=wish.prefix_reuse or self.options.prefix_reuse,
            reason=reason(
                mode,
                rungs,
                wish,
                prompt_tokens=prompt_tokens,
                asked=asked,
                reserve=self.options.reserve,
                native_length=self.native_length,
                rule=None if rule is None else _in_words(rule),
            ),
            max_tokens=min(asked, rungs[-1].max_length - prompt_tokens),
        )

    def _rule(self, prompt_tokens: int, wish: RopeWish) -> ModeRule | None:
        """The operator's rule for the mode, unless the wish decides it or there is none."""
        if wish.mode is not None or wish.factor is not None or wish.scheme == "default":
            return None
        fitting = (
            rule for rule in self.options.mode if rule.prompt_tokens is None or prompt_tokens <= rule.prompt_tokens
        )
        return next(fitting, None)

    def _mode(self, prompt_tokens: int, asked: int, wish: RopeWish, rule: ModeRule | None) -> Mode:
        native = self.rungs[0]
        growth = wish.growth or self.options.growth
        if wish.mode is not None:
            return wish.mode
        if wish.scheme == "default":
            return "native"
        if wish.factor is not None and (wish.factor != native.factor or growth == "stop"):
            return "native" if wish.factor == native.factor else "static"
        if rule is not None:
            grows = rule.mode == "native" and wish.growth not in (None, "stop")
            return "dynamic" if grows and prompt_tokens + asked > native.covers else rule.mode
        if prompt_tokens + asked <= native.covers:
            return "native"
        return "dynamic" if prompt_tokens <= native.covers - (growth == "stop") else "static"

    def _growth(self, mode: Mode, wish: RopeWish) -> Growth:
        if wish.is_unscaled_for_ever or (mode == "native" and wish.growth is None):
            return "stop"
        return wish.growth or self.options.growth

    def _start(self, mode: Mode, growth: Growth, prompt_tokens: int, asked: int, wish: RopeWish) -> int:
        """The number of the rung to start under: the one asked for, or the smallest that covers what it has to.

        There is one: `asked` is at most what remains below the maximum length, which the last rung covers.
        """
        ahead = 0 if growth != "stop" else 1  # whoever grows needs no room beyond the prompt
        if wish.factor is not None or wish.is_unscaled_for_ever or mode == "native":
            start = 0 if wish.factor is None else self.ladder.index(wish.factor)
            self._check_covers(start, wish, prompt_tokens, ahead)
            return start
        if mode == "static":
            ahead = min(asked, self.options.reserve)
        return next(number for number, rung in enumerate(self.rungs) if rung.covers >= prompt_tokens + ahead)

    def _check_covers(self, start: int, wish: RopeWish, prompt_tokens: int, ahead: int) -> None:
        covered = self.rungs[start].covers
        if prompt_tokens + ahead <= covered:
            return
        rungs = listed(rung.factor for rung in self.rungs if rung.covers >= prompt_tokens + ahead)
        message = f"factor {exact(self.ladder[start])} covers {covered} tokens, which has no room for the prompt of "
        message += (
            f"{prompt_tokens} tokens{' and one more' * ahead}; allowed, with a scheme that scales: factor {rungs}"
        )
        asked_by = "factor" if wish.factor is not None else "mode" if wish.mode == "native" else "scheme"
        raise WishError(message, param=f"rope.{asked_by}")

    def _path(self, rungs: Iterable[Rung], scheme: str | None) -> tuple[PositionPlan, ...]:
        """The plans of rungs; of those that follow each other and rotate alike, the one that reaches further."""
        plans: list[PositionPlan] = []
        for plan in (self.plan(scheme, rung) for rung in rungs):
            if plans and plans[-1] == plan:
                plans.pop()
            plans.append(plan)
        return tuple(plans)


def _check_native_rules(rules: Iterable[ModeRule], native_length: int) -> None:
    for rule in rules:
        if rule.mode == "native" and (rule.prompt_tokens is None or rule.prompt_tokens >= native_length):
            limit = f"prompt_tokens below the native length {native_length}"
            message = f"mode: an entry with mode native needs {limit}, it has {rule.prompt_tokens or 'none'}"
            raise OptionError(message, "mode", "native_length")


def _in_words(rule: ModeRule) -> str:
    limit = "" if rule.prompt_tokens is None else f" for prompts up to {rule.prompt_tokens} tokens"
    return f"{rule.mode}{limit}, as this server's policy says"
