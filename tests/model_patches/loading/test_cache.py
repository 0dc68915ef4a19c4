"""An entry of the cache is whole or not there."""

import logging
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from model_patches.errors import CacheFolderError
from model_patches.loading.cache import build_once, default_cache_dir

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 60

KILLED_WHILE_BUILDING = """
import os, signal, sys
from pathlib import Path
from model_patches.loading.cache import build_once

def build(folder):
    (folder / "config.json").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

build_once(Path(sys.argv[1]), build)
"""


class WaitingSeen(logging.Handler):
    """Sets an event when somebody logs that it waits for another builder."""

    def __init__(self) -> None:
        super().__init__()
        self.event = Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting" in record.getMessage():
            self.event.set()


def write_whole(folder: Path) -> None:
    (folder / "config.json").write_text("whole")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    builds: list[Path] = []

    def build(folder: Path) -> None:
        builds.append(folder)
        write_whole(folder)

    entry = tmp_path / "models" / "entry"
    assert build_once(entry, build) == build_once(entry, build) == entry
    assert len(builds) == 1
    assert (entry / "config.json").read_text() == "whole"


def test_the_entry_does_not_exist_before_it_is_whole(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    existed: list[bool] = []

    def build(folder: Path) -> None:
        write_whole(folder)
        existed.append(entry.exists())

    build_once(entry, build)
    assert existed == [False]


def test_what_a_killed_build_left_is_not_used(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_BUILDING, str(entry)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert names_in(tmp_path) == [".entry.partial"]

    found: list[list[Path]] = []

    def build(folder: Path) -> None:
        found.append(list(folder.iterdir()))
        write_whole(folder)

    build_once(entry, build)
    assert found == [[]]
    assert (entry / "config.json").read_text() == "whole"
    assert names_in(tmp_path) == ["entry"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        write_whole(folder)
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"):
        build_once(tmp_path / "entry", build)
    assert names_in(tmp_path) == []


def test_of_two_builders_one_waits_and_uses_the_others_entry(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    started, waiting, builders = Event(), WaitingSeen(), []

    def build(folder: Path) -> None:
        builders.append(folder)
        started.set()
        assert waiting.event.wait(PATIENCE_SECONDS)
        write_whole(folder)

    logger = logging.getLogger("model_patches.loading.cache")
    level = logger.level
    logger.addHandler(waiting)
    logger.setLevel(logging.INFO)
    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(build_once, entry, build)
            assert started.wait(PATIENCE_SECONDS)
            second = pool.submit(build_once, entry, build)
            assert first.result() == second.result() == entry
    finally:
        logger.removeHandler(waiting)
        logger.setLevel(level)
    assert len(builders) == 1
    assert (entry / "config.json").read_text() == "whole"


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheFolderError, match=r"file/models cannot be written.*ROPEWALK_CACHE"):
        build_once(tmp_path / "file" / "models" / "entry", write_whole)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ROPEWALK_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"ROPEWALK_CACHE": "~/a"}, "/home/me/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/ropewalk"),
        ({"ROPEWALK_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/ropewalk"),
        ({}, "/home/me/.cache/ropewalk"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("ROPEWALK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_cache_dir() == Path(expected)
