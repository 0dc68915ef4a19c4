"""Why a request gets its plan, in words and numbers. Knows sentences; does not choose anything."""

from collections.abc import Sequence

from model_patches.plan import PositionPlan
from service.scaling.wish import Mode, RopeWish


def reason(
    mode: Mode,
    rungs: Sequence[PositionPlan],
    wish: RopeWish,
    *,
    prompt_tokens: int,
    asked: int,
    reserve: int,
    native_length: int,
    rule: str | None,
) -> str:
    """The whole sentence: why this plan, then what will happen when it is outgrown.

    Args:
        mode: the mode chosen.
        rungs: the plan chosen and those that it grows through.
        wish: what the request asked for.
        prompt_tokens: the prompt's length.
        asked: how many tokens may have to be generated.
        reserve: generated tokens that a static plan makes room for, at most.
        native_length: of the model.
        rule: the operator's rule that chose the mode, None where there is none.
    """
    plan, length = rungs[0], f"the native length {native_length}"
    prompt = f"prompt of {prompt_tokens} tokens"
    fits = prompt_tokens + asked <= plan.max_length
    if wish.factor is not None:
        said = f"factor {plan.factor:g} as asked covers {plan.max_length} tokens"
    elif mode == "native" and fits and prompt_tokens + asked <= native_length:
        said = f"{prompt} + {asked} to generate fits {length}"
    elif mode == "native":
        said = f"{prompt}: {rule}" if rule else "native as asked"
    elif mode == "dynamic":
        ruled = f"{rule}: " if rule else ""
        said = f"{prompt} + up to {asked} to generate: {ruled}starts at factor {plan.factor:g}"
    else:
        ahead = min(asked, reserve, plan.max_length - prompt_tokens)
        relation = "exceeds" if prompt_tokens > native_length else "leaves no room to generate within"
        cause = f"{prompt} {relation} {length}" if prompt_tokens >= native_length else rule or "static as asked"
        said = f"{cause}: factor {plan.factor:g} covers {prompt_tokens} + {ahead} reserved"
    if not fits:
        said += _beyond(rungs, prompt_tokens + asked, joined=mode == "dynamic")
    return said if wish.scheme in (None, plan.scheme) else f"{said}; {wish.scheme} as asked would begin beyond {length}"


def _beyond(rungs: Sequence[PositionPlan], longest: int, *, joined: bool) -> str:
    """What happens to a sequence that outgrows its first plan and may become `longest` tokens long."""
    first, *higher = rungs
    if not higher:
        return f"; generation ends at {first.max_length} tokens"
    computed = longest - 1  # nothing follows the last token
    if computed <= first.max_length:
        return ""
    needed = [plan for plan in higher if plan.max_length < computed]
    said = f"{', ' if joined else '; '}grows to factor {higher[0].factor:g} beyond {first.max_length} tokens"
    last = higher[min(len(needed), len(higher) - 1)]
    return said if last is higher[0] else f"{said}, step by step up to factor {last.factor:g}"
