"""What `make help` says is what the Makefile has."""

import re
from pathlib import Path

import pytest

MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text()
(TARGETS,) = re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)
VARIABLES = re.findall(r"^([A-Z]+) *\??=", MAKEFILE, re.MULTILINE)
HELP = "\n".join(re.findall(r"^#   (.*)", MAKEFILE, re.MULTILINE))


@pytest.mark.parametrize("target", TARGETS.split())
def test_every_target_is_in_the_help(target: str) -> None:
    assert re.search(rf"^make {target} ", HELP, re.MULTILINE)


@pytest.mark.parametrize("variable", VARIABLES)
def test_every_variable_is_in_the_help(variable: str) -> None:
    assert f"[{variable}=" in HELP


def test_nothing_else_is() -> None:
    assert set(re.findall(r"^make (\S+)", HELP, re.MULTILINE)) == set(TARGETS.split())
    assert set(re.findall(r"\[(\w+)=", HELP)) == set(VARIABLES)
