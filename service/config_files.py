"""Reads values by name from TOML and YAML files. Knows the two formats; does not know what the values mean."""

import tomllib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import yaml

from service.errors import StartupError


class UniqueNames(yaml.SafeLoader):
    """Refuses a name that is written twice, of which YAML's own loader would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        names = [name for name, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        for name in (name for name in names if isinstance(name, yaml.ScalarNode)):
            if name.value in seen:  # what a merge key brings is not there yet, and may be written again
                raise yaml.constructor.ConstructorError(None, None, f"{name.value} is written twice", name.start_mark)
            seen.add(name.value)
        return super().construct_mapping(node, deep)


def _yaml(text: str) -> Any:
    return yaml.load(text, UniqueNames)


PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
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
