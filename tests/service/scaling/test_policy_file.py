"""Policy files: both formats say the same, settings win, and what is wrong is named with its file."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.errors import StartupError
from service.scaling.options import ModeRule, RopePolicy, RungOptions
from service.scaling.policy_file import load_options

YAML = """
scheme: linear
ladder: [1.5, {factor: 2, scheme: ntk}]
max_length: 2000
native_length: 1000
native_rope: unscaled
reserve: 100
growth: reprefill
growth_refresh_tokens: 5
prefix_reuse: rerotate
mode: [{prompt_tokens: 500, mode: native}, {mode: static}]
requests_may_choose: [factor]
"""
TOML = """
scheme = "linear"
ladder = [1.5, {factor = 2, scheme = "ntk"}]
max_length = 2000
native_length = 1000
native_rope = "unscaled"
reserve = 100
growth = "reprefill"
growth_refresh_tokens = 5
prefix_reuse = "rerotate"
requests_may_choose = ["factor"]
[[mode]]
prompt_tokens = 500
mode = "native"
[[mode]]
mode = "static"
"""
ALL = RopePolicy(
    scheme="linear",
    ladder=(RungOptions(factor=1.5), RungOptions(factor=2, scheme="ntk")),
    max_length=2000,
    native_length=1000,
    native_rope="unscaled",
    reserve=100,
    growth="reprefill",
    growth_refresh_tokens=5,
    prefix_reuse="rerotate",
    mode=(ModeRule(prompt_tokens=500, mode="native"), ModeRule(mode="static")),
    requests_may_choose=("factor",),
)


def written(tmp_path: Path, name: str, text: str) -> Path:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(("name", "text"), [("p.yaml", YAML), ("p.yml", YAML), ("p.toml", TOML)])
def test_every_option_is_read(tmp_path: Path, name: str, text: str) -> None:
    assert load_options(written(tmp_path, name, text), {}) == ALL
    assert ALL.model_fields_set == RopePolicy.model_fields.keys()


def test_without_a_file_or_anything_in_it_the_defaults_hold(tmp_path: Path) -> None:
    assert load_options(None, {}) == load_options(written(tmp_path, "p.yaml", ""), {}) == RopePolicy()


def test_what_is_given_apart_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "p.yaml", "reserve: 100\nscheme: linear\n")
    options = load_options(file, {"scheme": "ntk", "growth": "stop"})
    assert (options.scheme, options.reserve, options.growth, options.prefix_reuse) == ("ntk", 100, "stop", "same-plan")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("theta: 2", "theta is not an option; known are scheme, ladder, max_length, .*requests_may_choose$"),
        ("lader: [2]", r"lader is not an option: did you mean ladder\?$"),
        ("max-length: 64", r"max-length is not an option: did you mean max_length\?$"),
        ("ladder: [2, {factor: 4, schema: ntk}]", r"ladder.1.schema is not an option: did you mean scheme\?$"),
        ("ladder: [2, {factor: 4, theta: 5}]", r"ladder.1.theta is not an option; known are factor, scheme$"),
        ("mode: [{prompt_token: 5}]", r"mode.0.prompt_token is not an option: did you mean prompt_tokens\?"),
        ("mode: [{prompt_tokens: 5}]", "p.yaml: mode.0.mode is missing$"),
        ("ladder: [1, 2]", "ladder.0.factor: must be greater than 1, it is 1"),
        ("ladder: [2, .inf]", "ladder.1.factor: .*finite.*, it is inf"),
        ("ladder: [4, 2]", "ladder: .*factors must rise, 2 follows 4"),
        ("ladder: [2, 2]", "factors must rise, 2 follows 2"),
        ("ladder: []", "ladder: .*at least 1 item"),
        ("ladder: [2, true]", "p.yaml: ladder.1: must be an object with factor, scheme, it is True$"),
        ("ladder: [true]", "p.yaml: ladder.0: must be an object with factor, scheme, it is True$"),
        ("ladder: {factor: 2}", "ladder: must be a list, it is {'factor': 2}"),
        ("max_length: 1", "max_length: .*greater than or equal to 2, it is 1"),
        ("native_length: 2.5", "native_length: .*integer, it is 2.5"),
        ("native_rope: never", "native_rope: .*'config' or 'unscaled', it is 'never'"),
        ("reserve: 0", "reserve: .*greater than or equal to 1, it is 0"),
        ("reserve: yes", "reserve: .*integer, it is True"),
        ("growth: sideways", "growth: .*'rerotate', 'reprefill' or 'stop', it is 'sideways'"),
        ("growth_refresh_tokens: -1", "growth_refresh_tokens: .*greater than or equal to 0, it is -1"),
        ("prefix_reuse: always", "prefix_reuse: .*'same-plan' or 'rerotate', it is 'always'"),
        ("mode: static", "mode: .*, it is 'static'"),
        ("mode: [{mode: fast}]", "mode.0.mode: .*'native', 'static' or 'dynamic', it is 'fast'"),
        ("mode: [{mode: static, prompt_tokens: 5}]", "p.yaml: mode: every entry .*, and the last must have none$"),
        ("scheme: ntk\nscheme: yarn", "scheme is written twice .*line 2"),
        ("mode: [{mode: static}, {mode: dynamic}]", "every entry but the last needs prompt_tokens"),
        (
            "mode: [{mode: static, prompt_tokens: 5}, {mode: dynamic, prompt_tokens: 5}, {mode: static}]",
            "mode: prompt_tokens must rise, 5 follows 5",
        ),
        ("requests_may_choose: [theta]", "requests_may_choose.0: .*'scheme', .*, it is 'theta'"),
        ("requests_may_choose: 5", "requests_may_choose: .*, it is 5"),
        ("- scheme", "must hold values by name"),
        ("scheme: [", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, text: str, said: str) -> None:
    file = written(tmp_path, "p.yaml", text)
    with pytest.raises(StartupError, match=said) as refusal:
        load_options(file, {})
    assert f"the policy file {file}" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_several_wrong_values_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"reserve: .*; growth: "):
        load_options(written(tmp_path, "p.yaml", "reserve: 0\ngrowth: up\n"), {})


def test_a_file_that_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"policy file .*p.yaml does not exist"):
        load_options(tmp_path / "p.yaml", {})
    with pytest.raises(StartupError, match=r"policy file .*p.json must end in .toml, .yaml, .yml"):
        load_options(written(tmp_path, "p.json", "{}"), {})


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (True, ("scheme", "mode", "factor", "growth", "prefix_reuse")),
        ("true", ("scheme", "mode", "factor", "growth", "prefix_reuse")),
        (False, ()),
        ("False", ()),
        ("scheme, factor", ("scheme", "factor")),
        (["mode"], ("mode",)),
        ([], ()),
    ],
)
def test_what_requests_may_choose_can_be_written_in_several_ways(value: Any, allowed: tuple[str, ...]) -> None:
    assert RopePolicy(requests_may_choose=value).requests_may_choose == allowed


def test_a_ladder_can_be_written_as_text() -> None:
    assert RopePolicy(ladder="1.25, 2").ladder == (RungOptions(factor=1.25), RungOptions(factor=2))  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        RopePolicy(ladder="1.25, two")  # type: ignore[arg-type]
