"""From the command line to settings. Knows argparse and the settings' names; does not know what a command does."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from service.errors import StartupError
from service.settings import Settings, settings_class


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
    given = {name: value for name, value in arguments.items() if name in Settings.model_fields}
    file = arguments.get("config")
    try:
        return settings_class(file)(**given)
    except ValidationError as error:
        raise StartupError("; ".join(_describe(problem, given, file) for problem in error.errors())) from error


def _describe(problem: Any, given: Mapping[str, Any], file: Path | None) -> str:
    if not problem["loc"]:
        return str(problem["msg"])
    name, *within = map(str, problem["loc"])
    source = _source(name, given, file)
    if problem["type"] == "extra_forbidden":
        return f"{source} is not a setting"
    place = "".join(f", {part}" for part in within)
    return f"{source}{place}: {problem['msg']}, it is {problem['input']!r}"


def _source(name: str, given: Mapping[str, Any], file: Path | None) -> str:
    """Where the value of a setting was written."""
    if name in given:
        return "MODEL" if name == "model" else _flag(name)
    variable = f"ROPEWALK_{name.upper()}"
    if any(known.upper() == variable for known in os.environ):
        return variable
    return f"{file}: {name}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
