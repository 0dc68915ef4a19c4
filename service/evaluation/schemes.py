"""The schemes to compare, as the command line says them, and the plans that they give a length.

Knows plans and the policy. Does not know what is measured under them.
"""

import math
from dataclasses import dataclass, replace

from model_patches.errors import UnsupportedModelError
from model_patches.plan import PositionPlan, make_plan
from service.errors import RequestError
from service.evaluation.errors import EvaluationError
from service.scaling.fixed import AnyPolicy, FixedPolicy
from service.scaling.policy import Growth, PlanChoice, Policy

POLICY = "policy"
"""The scheme that stands for whatever the policy chooses."""


@dataclass(frozen=True)
class SchemeAsked:
    """What to compare.

    Attributes:
        name: a scheme's, or `policy`.
        factor: always on, at every length; None: the factor that just covers the length, 1 up to the native one.
    """

    name: str
    factor: float | None = None

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name}:{self.factor:g}"

    @property
    def is_always_on(self) -> bool:
        """Whether it scales short texts too."""
        return self.factor is not None and self.factor != 1.0


def parse_schemes(text: str) -> tuple[SchemeAsked, ...]:
    """Read `default,ntk,yarn:2,policy`.

    Raises:
        EvaluationError: a factor is no number of 1 or more, or does not go with the name.
    """
    return tuple(dict.fromkeys(_parse_scheme(part.strip()) for part in text.split(",")))


def _parse_scheme(text: str) -> SchemeAsked:
    name, colon, number = text.partition(":")
    if not colon:
        return SchemeAsked(name)
    try:
        factor = float(number)
    except ValueError:
        raise EvaluationError(f"--schemes: {text!r} is not SCHEME:FACTOR") from None
    if not 1 <= factor < math.inf:
        raise EvaluationError(f"--schemes: {text!r}: a factor is at least 1")
    if name in (POLICY, "default"):
        raise EvaluationError(f"--schemes: {text!r}: {name} takes no factor")
    return SchemeAsked(name, factor)


def check_schemes(asked: tuple[SchemeAsked, ...], policy: AnyPolicy) -> None:
    """Refuse what the model cannot run.

    Raises:
        EvaluationError: a scheme is unknown or not for this model; the message names those that are.
    """
    known = dict.fromkeys([POLICY, "default", *policy.schemes])
    if isinstance(policy, FixedPolicy):
        del known["default"]
        why = f"{policy.why}; "
    else:
        why = "the model's own plan is scaled already; " if policy.geometry.is_scaled else ""
    for scheme in asked:
        if scheme.name not in known or (why and scheme.factor is not None):
            raise EvaluationError(f"--schemes: {scheme} is not for this model: {why}known are {', '.join(known)}")


def native_plan(policy: AnyPolicy) -> PositionPlan:
    """The model's own plan, computed without asking the policy."""
    if isinstance(policy, FixedPolicy):
        return policy.encoding.plan(policy.native_length)
    geometry = policy.geometry
    # A longrope or clex model's factor is that of its longest plan, not of its native one.
    reaches_further = geometry.trained_length > geometry.native_length
    return make_plan(geometry, geometry.scheme, 1.0 if reaches_further else geometry.factor, geometry.native_length)


def choose(asked: SchemeAsked, policy: AnyPolicy, length: int) -> PlanChoice | None:
    """The plans of a sequence that is `length` tokens long in all, prompt and one generated token together.

    A scheme of one's own never grows, and also goes where the policy would refuse it: an evaluation shows what happens
    there. Nothing but this says that a server would run it.

    Args:
        asked: a scheme of those that the model can run.
        policy: gives the geometry, and the plans of `policy`.
        length: in tokens, at least 2.

    Returns:
        None where the policy serves no such length, or the model has no such positions.
    """
    has_end = isinstance(policy, FixedPolicy) and policy.encoding.has_end
    if asked.name == POLICY or has_end:
        try:
            return policy.choose(length - 1, 1)
        except RequestError:
            return None
    return fixed(_plan(asked, policy, length), length)


def fixed(plan: PositionPlan, length: int) -> PlanChoice:
    """One plan for a sequence of so many tokens, however far it was meant to reach."""
    plan = replace(plan, max_length=max(plan.max_length, length))
    return PlanChoice(
        rungs=(plan,),
        mode="static",
        growth="stop",
        prefix_reuse="same-plan",
        reason=f"an evaluation asks for {plan.scheme}, factor {plan.factor:g}",
        max_tokens=length,
    )


def growing(policy: AnyPolicy, growth: Growth, length: int) -> PlanChoice:
    """From the native plan through the policy's ladder, whatever the policy says of growth and who may ask for it."""
    assert isinstance(policy, Policy)  # with any other nothing grows
    return PlanChoice(
        rungs=tuple(policy.plan(None, rung) for rung in policy.rungs),
        mode="dynamic",
        growth=growth,
        prefix_reuse="same-plan",
        reason="an evaluation follows the ladder",
        max_tokens=length,
    )


def _plan(asked: SchemeAsked, policy: AnyPolicy, length: int) -> PositionPlan:
    if isinstance(policy, FixedPolicy):
        return native_plan(policy)
    geometry, native = policy.geometry, policy.native_length
    if geometry.is_scaled or asked.name == "default" or (asked.factor is None and length <= native):
        return native_plan(policy)
    factor = asked.factor or length / native
    covers = length if asked.factor is None else round(factor * native)
    try:
        return make_plan(geometry, asked.name, factor, covers)
    except UnsupportedModelError as error:
        raise EvaluationError(f"{error} (scheme {asked})") from error
