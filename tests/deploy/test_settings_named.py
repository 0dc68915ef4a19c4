"""Every variable and flag that deployment files and docs speak of is one that the server has."""

import re
from pathlib import Path

import pytest

from service.cli import load_settings
from service.settings import Settings
from tests.deploy.files import DEPLOY, DOCS, KUBERNETES, ROOT, documents, settings_of

FILES = sorted(
    path
    for path in [ROOT / "Dockerfile", *DEPLOY.rglob("*"), *DOCS.glob("*.md")]
    if path.is_file() and path.suffix != ".pyc"
)
VARIABLES = {f"ROPEWALK_{name.upper()}" for name in Settings.model_fields} | {"ROPEWALK_CACHE"}
FLAGS = {f"--{name.replace('_', '-')}" for name in Settings.model_fields} | {"--prompt-tokens", "--max-tokens"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_variable_exists(path: Path) -> None:
    named = {*re.findall(r"\bROPEWALK_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))}
    assert named - VARIABLES == set()


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_a_flag_in_the_docs_exists(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    spans = [span for span in re.findall(r"`([^`]+)`", text) if span.startswith(("--", "ropewalk "))]
    named = {flag for span in spans for flag in re.findall(r"(?<!\S)--[a-z-]+", span)}
    assert named - FLAGS == set()


@pytest.mark.parametrize(
    "path", [p for p in FILES if DEPLOY in p.parents], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_flag_in_a_comment_exists(path: Path) -> None:
    comments = re.findall(r"(?:^|\s)#(?! *(?:docker|kubectl)\b)(.*)$", path.read_text(encoding="utf-8"), re.M)
    named = {flag for comment in comments for flag in re.findall(r"(?<![\w-])--[a-z-]*[a-z]\b", comment)}
    assert named - FLAGS - {"--from-file", "--build", "--build-arg"} == set()


def test_the_settings_of_a_cluster_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    values = settings_of(KUBERNETES / "base" / "settings.env")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    settings = load_settings({})
    changed = {f"ROPEWALK_{name.upper()}" for name in settings.model_fields_set}
    assert changed == values.keys()


def test_the_settings_of_compose_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    values = compose["services"]["ropewalk"]["environment"]
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert {name.upper() for name in load_settings({}).model_fields_set} >= {name[9:] for name in values}
