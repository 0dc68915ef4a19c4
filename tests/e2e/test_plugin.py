"""A scheme in a package of its own: the one that the README shows, installed by pip beside the program and served."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_embedded import ROOT, program
from tests.serving import DEADLINE

SETTINGS = ("--native-length", "64", "--max-model-len", "256", "--kv-cache-memory", "64MiB", "--dtype", "float32")


def readme_block(language: str) -> str:
    """The first block of a language in what the README says on adding a scheme."""
    _, _, after = (ROOT / "README.md").read_text().partition("To add a scheme: ")
    found = re.search(rf"```{language}\n(.*?)```", after.partition("\n## ")[0], re.DOTALL)
    assert found, f"the README shows no {language} on adding a scheme"
    return found[1]


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's package is installed."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(readme_block("toml"))
    (source / "halfway_rope.py").write_text(readme_block("python"))
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def client(
    site_folder: Path, embedded_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Of a program that finds the package, and scales by it what grows."""
    folder = tmp_path_factory.mktemp("program")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site_folder), os.environ.get("PYTHONPATH")])))
        with (
            program(folder, str(embedded_model_folder), *SETTINGS, "--rope-scheme", "halfway") as running,
            running.client_once_ready() as client,
        ):
            patch.undo()
            yield client


def rope_of(client: httpx.Client, prompt_tokens: int, max_tokens: int, **rope: Any) -> dict[str, Any]:
    body = {"prompt": [1000] * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True, "rope": rope}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()["rope"]
    return told


def test_a_request_may_ask_for_it(client: httpx.Client) -> None:
    rope = rope_of(client, 10, 4, scheme="halfway", factor=2)
    assert (rope["scheme"], rope["mode"], rope["factor"]) == ("halfway", "static", 2.0)


def test_its_numbers_are_those_in_use(client: httpx.Client) -> None:
    body = {"prompt": [1000] * 10, "max_tokens": 4, "rope": {"scheme": "halfway", "factor": 2}}
    told = client.post("/v1/rope/plan", json=body).json()
    unscaled = [1e5 ** (-pair / 32) for pair in range(32)]
    assert told["scheme"] == "halfway"
    assert told["inv_freq"] == pytest.approx(unscaled[:16] + [theta / 2 for theta in unscaled[16:]])


def test_a_request_that_began_unscaled_grows_into_it(client: httpx.Client) -> None:
    rope = rope_of(client, 60, 30)  # of 64
    assert (rope["scheme"], rope["mode"]) == ("halfway", "dynamic")
    assert rope["rerotations"] >= 1
    assert rope["factor"] > 1


def test_without_the_package_the_program_does_not_know_it(embedded_model_folder: Path, tmp_path: Path) -> None:
    with program(tmp_path, str(embedded_model_folder), *SETTINGS, "--rope-scheme", "halfway") as running:
        assert running.process.wait(DEADLINE) == 2, running.said
        assert "it is 'halfway'" in running.said
