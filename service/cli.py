"""From the command line to settings. Knows argparse and the settings' names; does not know what a command does."""

import argparse
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
        flag = "--" + name.replace("_", "-")
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            shown = "{" + ",".join(values) + "}" if values else "VALUE"
            parser.add_argument(flag, default=argparse.SUPPRESS, metavar=shown, help=text)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", default=None, help="settings from a .toml, .yaml or .yml file"
    )


def load_settings(arguments: Mapping[str, Any]) -> Settings:
    """Settings from parsed arguments, the environment and the file named by `--config`.

    Raises:
        StartupError: a value is wrong, or a name is unknown; the message names both.
    """
    given = {name: value for name, value in arguments.items() if name in Settings.model_fields}
    try:
        return settings_class(arguments.get("config"))(**given)
    except ValidationError as error:
        raise StartupError("; ".join(_describe(problem) for problem in error.errors())) from error


def _describe(problem: Any) -> str:
    name = ".".join(map(str, problem["loc"])) or "settings"
    if problem["type"] == "extra_forbidden":
        return f"{name} is not a setting"
    value = f", it is {problem['input']!r}" if problem["loc"] else ""
    return f"{name.replace('_', '-')}: {problem['msg']}{value}"
