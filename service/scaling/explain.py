"""A choice of plan told in full, for people and for scripts.

Knows how to compare a plan's frequencies with the unscaled ones. Does not know how the choice was made.
"""

import math
from dataclasses import asdict
from typing import Any

from model_patches.geometry import OWN_TABLES, RopeGeometry
from model_patches.plan import PositionPlan
from model_patches.schemes.frequencies import geometric_series
from service.scaling.fixed import AnyPolicy
from service.scaling.policy import PlanChoice, Policy

ROUNDING = 1e-9  # relative; far above what float64 loses in a formula, far below any step of a ramp


def explain(choice: PlanChoice, policy: AnyPolicy, prompt_tokens: int) -> dict[str, Any]:
    """Everything about a choice, as JSON-ready values.

    Lengths are in tokens and `inv_freq` in radians per position. `scheme`, `factor`, `attention_factor`, `inv_freq`,
    `pairs` and `plan_max_length` are of the plan that the sequence starts under; `rungs` are that plan and those that
    it grows through. `max_length` and `ladder` are the server's. `local` is how layers with a window are rotated,
    whatever the plan, null where all layers are alike. `pairs` is described at `explain_pairs`; it and
    `inv_freq` are empty where nothing is rotated.
    """
    plan = choice.plan
    geometry = policy.geometry if isinstance(policy, Policy) else None
    local = None if geometry is None else geometry.local
    return {
        "scheme": plan.scheme,
        "mode": choice.mode,
        "factor": plan.factor,
        "growth": choice.growth,
        "prefix_reuse": choice.prefix_reuse,
        "reason": choice.reason,
        "prompt_tokens": prompt_tokens,
        "max_tokens": choice.max_tokens,
        "native_length": policy.native_length,
        "max_length": policy.max_length,
        "plan_max_length": plan.max_length,
        "attention_factor": plan.attention_factor,
        "inv_freq": list(plan.inv_freq),
        "rungs": [explain_rung(rung.scheme, rung.factor, rung.max_length) for rung in choice.rungs],
        "ladder": [explain_rung(rung.scheme, rung.factor, rung.covers) for rung in policy.rungs],
        "local": None if local is None else asdict(local) | {"layer_types": list(local.layer_types)},
        "pairs": [] if geometry is None else explain_pairs(plan, geometry),
    }


def explain_rung(scheme: str, factor: float, max_length: int) -> dict[str, Any]:
    """One rung: how it scales and how many tokens it covers."""
    return {"scheme": scheme, "factor": factor, "max_length": max_length}


def explain_pairs(plan: PositionPlan, geometry: RopeGeometry) -> list[dict[str, Any]]:
    """One entry for each pair of dimensions, fastest first.

    `wavelength` is λ = 2π/θ of the unscaled pair and `plan_wavelength` that of the plan, both in tokens; `rotations`
    is L/λ with the original length L, by which YaRN decides. `kind` is "kept" where the plan leaves the frequency as
    it is, "interpolated" where it divides it by the factor or more, "blended" between; with a scheme that has a divisor
    for each pair, whatever the factor, "divided by" that.
    """
    unscaled = geometric_series(geometry.theta, geometry.rotary_dim).tolist()
    return [
        {
            "wavelength": 2 * math.pi / before,
            "rotations": geometry.original_length * before / (2 * math.pi),
            "plan_wavelength": 2 * math.pi / after,
            "kind": _kind(before / after, plan),
        }
        for before, after in zip(unscaled, plan.inv_freq, strict=True)
    ]


def _kind(slowdown: float, plan: PositionPlan) -> str:
    if plan.scheme in OWN_TABLES:  # a number of its own for each pair: no ramp from 1 to the factor
        return "kept" if abs(slowdown - 1) <= ROUNDING else f"divided by {slowdown:.4g}"
    if slowdown <= 1 + ROUNDING:
        return "kept"
    return "interpolated" if slowdown >= plan.factor * (1 - ROUNDING) else "blended"
