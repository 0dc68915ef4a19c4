"""From the command line to settings. Knows argparse and the settings' names; does not know what a command does."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr, ValidationError

from service.environment import is_service_link, variable_of
from service.errors import StartupError
from service.problems import fields_at, innermost, shown, wanted
from service.scaling.options import OptionError
from service.scaling.policy_file import load_options
from service.settings import ROPE_OPTIONS, Settings, settings_class
from service.suggest import did_you_mean


def add_settings(parser: argparse.ArgumentParser, *, only: Sequence[str] = ()) -> None:
    """Add MODEL and an option for every setting, or for those named.

    Values are taken as text and checked by `Settings`, so that all sources are checked alike.
    """
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=Settings.model_fields["model"].description)
    for name, field in Settings.model_fields.items():
        if name == "model" or (only and name not in only):
            continue
        text = field.description if field.default is None else f"{field.description} (default: {field.default})"
        text = (text or "").replace("%", "%%")  # argparse would fill in values
        if field.annotation is bool:
            action = argparse.BooleanOptionalAction if field.default else "store_true"
            parser.add_argument(_flag(name), action=action, default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(_flag(name), default=argparse.SUPPRESS, metavar=_metavar(field.annotation), help=text)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", default=None, help="settings from a .toml, .yaml or .yml file"
    )


def _metavar(annotation: Any) -> str:
    """The values that a setting takes, where they are listed in its type."""
    for kind in (annotation, *get_args(annotation)):  # either may be `Literal[...] | None`
        if get_origin(kind) is Literal:
            return "{" + ",".join(get_args(kind)) + "}"
    return "VALUE"


def load_settings(arguments: Mapping[str, Any]) -> Settings:
    """Settings from parsed arguments, the environment and the file named by `--config`.

    Raises:
        StartupError: a value is wrong, or a name is unknown; the message names both, and where they were written.
    """
    try:
        return settings_class(arguments.get("config"))(**_given(arguments))
    except ValidationError as error:
        raise StartupError("; ".join(_describe(problem, arguments) for problem in innermost(error.errors()))) from error


@contextmanager
def naming_sources(arguments: Mapping[str, Any], settings: Settings) -> Iterator[None]:
    """Add to what is wrong with the policy's options where each of them was written.

    Args:
        arguments: those that the settings were loaded from.
        settings: what was loaded.

    Raises:
        StartupError: in place of each `OptionError`.
    """
    try:
        yield
    except OptionError as error:
        sources = {option: _source(ROPE_OPTIONS[option], arguments) for option in settings.rope_options()}
        for option in load_options(settings.rope_policy, {}).model_fields_set:
            sources.setdefault(option, f"the policy file {settings.rope_policy}")
        named = [f"{option}: {sources[option]}" for option in error.options if option in sources]
        raise StartupError(f"{error} ({'; '.join(named)})" if named else str(error)) from error


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among parsed arguments."""
    return {name: value for name, value in arguments.items() if name in Settings.model_fields}


def _describe(problem: Any, arguments: Mapping[str, Any]) -> str:
    if not problem["loc"]:
        return wanted(problem)
    name, *within = problem["loc"]
    source = _source(name, arguments)
    place = "".join(f", {part}" for part in within)
    *parents, last = problem["loc"]
    if problem["type"] == "extra_forbidden":
        what = "a setting" if not within else "one of its options"
        return f"{source}{place} is not {what}{did_you_mean(last, fields_at(Settings, parents))}"
    if problem["type"] == "missing":
        return f"{source}{place} is missing"
    if SecretStr in get_args(Settings.model_fields[name].annotation):
        return f"{source}: must be a string that is not empty"
    is_link = source == variable_of(name) and is_service_link(source, str(problem["input"]))
    why = "; Kubernetes set it, for a Service named ropewalk: put enableServiceLinks: false into the pod's spec"
    said = f"{source}{place}: {wanted(problem, fields_at(Settings, problem['loc']))}, it is {shown(problem['input'])}"
    return said + why * is_link


def _source(name: str, arguments: Mapping[str, Any]) -> str:
    """Where the value of a setting was written."""
    if name in _given(arguments):
        return "MODEL" if name == "model" else _flag(name)
    if any(known.upper() == variable_of(name) and value for known, value in os.environ.items()):
        return variable_of(name)
    return f"{arguments.get('config')}: {name}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
