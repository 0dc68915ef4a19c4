"""`ropewalk plan`: the plan that a request would get, without weights."""

import json
from collections.abc import Mapping
from typing import Any

from service import build
from service.cli import load_settings
from service.errors import RequestError
from service.scaling.explain import explain
from service.scaling.policy import RopeWish


def plan(arguments: Mapping[str, Any]) -> None:
    """Print the plan that a request would get. Reads config.json only.

    Raises:
        StartupError: the model or a setting is wrong.
        RequestError: the request would be refused.
    """
    for name in ("prompt_tokens", "max_tokens"):
        if arguments[name] is not None and arguments[name] < 1:
            raise RequestError(f"{name} must be at least 1, it is {arguments[name]}", param=name)
    policy = build.inspect(load_settings(arguments)).policy
    wish = RopeWish(scheme=arguments["scheme"], factor=arguments["factor"])
    choice = policy.choose(arguments["prompt_tokens"], arguments["max_tokens"], wish)
    facts = explain(choice, policy)
    if arguments["json"]:
        print(json.dumps(facts))
        return
    for name in ("scheme", "mode", "factor", "attention_factor", "native_length", "max_length", "max_tokens", "reason"):
        print(f"{name:17} {facts[name]}")
    print(f"{'ladder':17} {', '.join(f'{factor:g}' for factor in policy.ladder)}")
    print("\npair  wavelength  rotations  under plan  kind")
    for number, pair in enumerate(facts["pairs"]):
        print(
            f"{number:4}  {pair['wavelength']:10.1f}  {pair['rotations']:9.2f}  "
            f"{pair['plan_wavelength']:10.1f}  {pair['kind']}"
        )
