"""Reads values by name from TOML and YAML files. Knows the two formats; does not know what the values mean."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from service.errors import StartupError

PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}


def read_named_values(file: Path, *, kind: str) -> dict[str, Any]:
    """The values of a file, by name.

    Args:
        file: .toml, .yaml or .yml.
        kind: what the file is, for messages: "settings file".

    Raises:
        StartupError: the file does not exist, is of another format or cannot be read.
    """
    if not file.is_file():
        raise StartupError(f"the {kind} {file} does not exist")
    if file.suffix not in PARSERS:
        raise StartupError(f"the {kind} {file} must end in {', '.join(PARSERS)}")
    try:
        content = PARSERS[file.suffix](file.read_text(encoding="utf-8"))
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise StartupError(f"the {kind} {file} cannot be read: {' '.join(str(error).split())}") from error
    if content is None:  # YAML's way to read an empty file
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise StartupError(f"the {kind} {file} must hold values by name")
    return content
