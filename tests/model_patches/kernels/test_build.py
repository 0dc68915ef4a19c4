"""How the library of operators is found, built, and done without."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from model_patches.kernels import build
from model_patches.kernels.build import BuildError, find_compiler, find_or_build

HERE = Path(__file__).parents[3]


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that is as GCC when asked its version, writes its target and counts its calls in a file."""
    log = tmp_path / "calls"
    script = tmp_path / "g++"
    script.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo "g++ 1.0 Free Software Foundation" && exit\n'
        f'while [ "$1" != -o ]; do shift; done; echo "$2" >> {log}; echo library > "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def test_a_library_is_built_once(counted: Path, tmp_path: Path) -> None:
    first = find_or_build(tmp_path / "cache")
    calls = counted.read_text().splitlines()
    assert find_or_build(tmp_path / "cache") == first
    assert counted.read_text().splitlines() == calls
    assert len(calls) == len(build.SOURCES) + len(build._levels()) * len(build.LEVEL_SOURCES) + 1
    assert [path.name for path in first.parent.iterdir()] == ["libropewalk.so"]


def test_flags_and_compiler_have_libraries_of_their_own(
    counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = find_or_build(tmp_path)
    other = find_or_build(tmp_path, ("-O1",))
    script = Path(os.environ["CXX"])
    script.write_text(script.read_text().replace("1.0", "1.1"))
    assert counted.exists()
    assert len({first, other, find_or_build(tmp_path)}) == 3
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert find_or_build(tmp_path) not in {first, other}


def test_processes_that_start_together_build_one_library(counted: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from model_patches.kernels.build import find_or_build; "
    command = [sys.executable, "-c", code + "print(find_or_build(Path(sys.argv[1])))", str(tmp_path / "cache")]

    def start(_: int) -> str:
        return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(start, range(2)))) == 1
    calls = counted.read_text().splitlines()
    assert len(calls) == len(set(calls))


def test_without_a_compiler_a_library_that_was_built_before_serves(
    counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = find_or_build(tmp_path / "cache")
    assert counted.exists()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_or_build(tmp_path / "cache") == built
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        find_or_build(tmp_path / "other")


def test_a_compiler_that_is_not_gcc_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "clang++"
    script.write_text("#!/bin/sh\necho clang version 19\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match="not GCC"):
        find_compiler()


def test_where_compiling_fails_one_line_says_why_and_nothing_is_left(
    counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = Path(os.environ["CXX"])
    script.write_text(script.read_text().replace("echo library", 'echo "x.cpp:1: error: no" >&2; exit 3; echo'))
    monkeypatch.setenv("ROPEWALK_CACHE", str(tmp_path / "cache"))
    build.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert build.load() is False
    finally:
        build.load.cache_clear()
    [record] = caplog.records
    assert "status 3: x.cpp:1: error: no" in record.getMessage()
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
    assert counted.exists()
