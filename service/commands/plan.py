"""`ropewalk plan`: the plan that a request would get, without weights."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from service import build
from service.cli import load_settings, naming_sources
from service.errors import RequestError
from service.scaling.explain import explain
from service.scaling.wish import RopeWish

TOLD = ("mode", "scheme", "factor", "attention_factor", "growth", "prefix_reuse", "max_tokens", "reason")


def plan(arguments: Mapping[str, Any]) -> None:
    """Print the plan that a request would get. Reads config.json only, and of a CLEX model its trained frequencies.

    Raises:
        StartupError: the model or a setting is wrong.
        RequestError: the request would be refused.
    """
    for name in ("prompt_tokens", "max_tokens"):
        if arguments[name] is not None and arguments[name] < 1:
            raise RequestError(f"{name} must be at least 1, it is {arguments[name]}", param=name)
    settings = load_settings(arguments)
    with naming_sources(arguments, settings):
        policy = build.read_policy(settings)
    wish = RopeWish(
        scheme=arguments["scheme"],
        mode=arguments["mode"],
        factor=arguments["factor"],
        growth=arguments["wished_growth"],
    )
    prompt_tokens = arguments["prompt_tokens"]
    facts = explain(policy.choose(prompt_tokens, arguments["max_tokens"], wish), policy, prompt_tokens)
    print(json.dumps(facts) if arguments["json"] else "\n".join(_in_words(facts)))


def _in_words(facts: Mapping[str, Any]) -> Iterator[str]:
    for name in TOLD:
        yield f"{name:17} {facts[name]}"
    yield f"{'grows through':17} {' -> '.join(map(_rung, facts['rungs'][1:])) or 'nothing'}"
    yield f"{'native_length':17} {facts['native_length']}"
    yield f"{'max_length':17} {facts['max_length']}"
    for number, rung in enumerate(facts["ladder"]):
        yield f"{'' if number else 'ladder':17} {_rung(rung)}"
    if facts["local"] is not None:
        layers, theta = ", ".join(facts["local"]["layer_types"]), facts["local"]["theta"]
        yield f"{'local layers':17} {layers}: theta {theta:g}, never scaled"
    if not facts["pairs"]:
        yield f"{'rotated':17} nothing: its positions are no rotations"
        return
    yield "\npair  wavelength  rotations  under plan  inverse frequency  kind"
    for number, (pair, frequency) in enumerate(zip(facts["pairs"], facts["inv_freq"], strict=True)):
        yield (
            f"{number:4}  {pair['wavelength']:10.1f}  {pair['rotations']:9.2f}  "
            f"{pair['plan_wavelength']:10.1f}  {frequency:17.6g}  {pair['kind']}"
        )


def _rung(rung: Mapping[str, Any]) -> str:
    return f"{rung['scheme']}, factor {rung['factor']:g}, up to {rung['max_length']} tokens"
