"""A choice of plan told in full, for people and for scripts.

Knows how to compare a plan's frequencies with the unscaled ones. Does not know how the choice was made.
"""

import math
from typing import Any

from model_patches.geometry import RopeGeometry
from model_patches.plan import PositionPlan
from model_patches.schemes.frequencies import geometric_series
from service.scaling.policy import PlanChoice, Policy

ROUNDING = 1e-9  # relative; far above what float64 loses in a formula, far below any step of a ramp


def explain(choice: PlanChoice, policy: Policy) -> dict[str, Any]:
    """Everything about a choice, as JSON-ready values.

    Lengths are in tokens, `inv_freq` in radians per position, `max_length` is the server's and `plan_max_length`
    the plan's. `pairs` is described at `explain_pairs`.
    """
    plan = choice.plan
    return {
        "scheme": plan.scheme,
        "mode": choice.mode,
        "factor": plan.factor,
        "growth": choice.growth,
        "attention_factor": plan.attention_factor,
        "inv_freq": list(plan.inv_freq),
        "native_length": policy.native_length,
        "max_length": policy.max_length,
        "plan_max_length": plan.max_length,
        "reason": choice.reason,
        "max_tokens": choice.max_tokens,
        "ladder": list(policy.ladder),
        "pairs": explain_pairs(plan, policy.geometry),
    }


def explain_pairs(plan: PositionPlan, geometry: RopeGeometry) -> list[dict[str, Any]]:
    """One entry for each pair of dimensions, fastest first.

    `wavelength` is λ = 2π/θ of the unscaled pair and `plan_wavelength` that of the plan, both in tokens; `rotations`
    is L/λ with the original length L, by which YaRN decides. `kind` is "kept" where the plan leaves the frequency as
    it is, "interpolated" where it divides it by the factor or more, "blended" between.
    """
    unscaled = geometric_series(geometry.theta, geometry.rotary_dim).tolist()
    return [
        {
            "wavelength": 2 * math.pi / before,
            "rotations": geometry.original_length * before / (2 * math.pi),
            "plan_wavelength": 2 * math.pi / after,
            "kind": _kind(before / after, plan.factor),
        }
        for before, after in zip(unscaled, plan.inv_freq, strict=True)
    ]


def _kind(slowdown: float, factor: float) -> str:
    if slowdown <= 1 + ROUNDING:
        return "kept"
    return "interpolated" if slowdown >= factor * (1 - ROUNDING) else "blended"
