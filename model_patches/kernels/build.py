"""The shared library of C++ operators: compiled once into the cache folder, loaded from there ever after.

Knows the compiler, its flags and the folder of the library. Does not know what the operators compute.

The compiler is called by hand. `torch.utils.cpp_extension.load` wants ninja, which is no dependency of ours, imports
setuptools at every start, and compiles all files with the same flags, while the inner loops here are compiled once for
each instruction set.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from model_patches.errors import CacheFolderError
from model_patches.loading.cache import build_once, default_cache_dir

SOURCES = (
    *("levels.cpp", "operators.cpp", "attention.cpp", "rotary.cpp"),
    *("linear.cpp", "linear_amx.cpp", "layer.cpp", "decoder.cpp", "sampling.cpp"),
)
"""Compiled once, for any CPU of the architecture."""
LEVEL_SOURCES = ("attention_kernels.cpp", "rotary_kernels.cpp", "linear_kernels.cpp", "sampling_kernels.cpp")
"""Compiled once for each instruction set, with ROPEWALK_LEVEL defined as its name."""
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "portable": (),
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        "avx512_bf16": (
            *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
            "-mavx512bf16",
        ),
    }
}
"""Machine → instruction set → flags. A machine that is not here has the portable one alone."""
_LIBRARY = "libropewalk.so"
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math")

_log = logging.getLogger(__name__)


class BuildError(Exception):
    """The operators cannot be compiled; the message says why in one line."""


@dataclass(frozen=True)
class Compiler:
    """A GCC.

    Attributes:
        command: its path.
        version: what it says of itself.
    """

    command: str
    version: str


@cache
def load() -> bool:
    """Make the operators known as `torch.ops.ropewalk.*`, compiling them if that was never done on this machine.

    Needs a fraction of a second once they are compiled. Without a compiler, or where compiling fails, one warning is
    logged with the reason.

    Returns:
        Whether they are there. Decided once in a process.
    """
    try:
        library = find_or_build(default_cache_dir())
        torch.ops.load_library(str(library))
    except (BuildError, CacheFolderError, OSError) as error:
        _log.warning("running without the C++ operators, on torch's own: %s", error)
        return False
    return True


def find_or_build(folder: Path, extra_flags: tuple[str, ...] = ()) -> Path:
    """The compiled library, built now if it is not in the folder.

    A library is found by its sources, torch's version, its flags and the compiler; where there is no compiler, any that
    was built from these sources for this torch will do, so that an image need not carry one.

    Args:
        folder: where libraries are kept; need not exist.
        extra_flags: for the compiler and linker.

    Raises:
        BuildError: there is no compiler, or it fails.
        CacheFolderError: the folder cannot be created or written.
    """
    prefix = f"operators-{_digest(_identity(extra_flags))}"
    try:
        compiler = find_compiler()
    except BuildError:
        built = sorted(folder.glob(f"{prefix}-*/{_LIBRARY}"))
        if not built:
            raise
        return built[0]
    entry = folder / f"{prefix}-{_digest([compiler.version])}"
    return build_once(entry, lambda partial: compile_into(partial, compiler, extra_flags)) / _LIBRARY


def find_compiler() -> Compiler:
    """$CXX, else g++, else c++. It must be GCC: another one's OpenMP is not the one that torch's threads run on.

    Raises:
        BuildError: there is none.
    """
    command = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    if command is None:
        raise BuildError("no C++ compiler (g++) was found")
    version = _run([command, "--version"])
    if "clang" in version or "Free Software Foundation" not in version:
        raise BuildError(f"{command} is not GCC")
    return Compiler(command, version)


def compile_into(folder: Path, compiler: Compiler, extra_flags: tuple[str, ...] = ()) -> None:
    """Compile all sources and link them to one library in `folder`.

    Raises:
        BuildError: the compiler fails.
    """
    _log.info("compiling the C++ operators, which is done once and takes a minute")
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    flags = [
        *_FLAGS,
        *extra_flags,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")),
    ]
    here = Path(__file__).parent
    jobs = [(here / source, folder / f"{source}.o", flags) for source in SOURCES]
    for level, level_flags in _levels().items():
        defined = [*flags, *level_flags, f"-DROPEWALK_LEVEL={level}"]
        jobs += [(here / source, folder / f"{source}.{level}.o", defined) for source in LEVEL_SOURCES]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(pool.map(lambda job: _compile(compiler, *job), jobs))
    libraries = torch_folder / "lib"
    # The OpenMP that came with torch: with a second one there would be a second pool of threads.
    openmp = [str(path) for path in sorted(libraries.glob("libgomp*.so*"))] or ["-lgomp"]
    search = [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    linked = [*map(str, objects), *search, "-ltorch_cpu", "-lc10", *openmp]
    _run([compiler.command, "-shared", *extra_flags, "-o", str(folder / _LIBRARY), *linked])
    for path in objects:
        path.unlink()


def _levels() -> dict[str, tuple[str, ...]]:
    return LEVELS.get(platform.machine(), {"portable": ()})


def _compile(compiler: Compiler, source: Path, target: Path, flags: list[str]) -> Path:
    _run([compiler.command, *flags, "-c", str(source), "-o", str(target)])
    return target


def _identity(extra_flags: tuple[str, ...]) -> list[str]:
    """All that a library depends on but the compiler."""
    here = Path(__file__).parent
    sources = [path.read_text() for path in sorted(here.glob("*.cpp")) + sorted(here.glob("*.h"))]
    flags = [*_FLAGS, *extra_flags, *SOURCES, *LEVEL_SOURCES, str(_levels())]
    return [torch.__version__, platform.machine(), *flags, *sources]


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> str:
    """What a command prints.

    Raises:
        BuildError: it cannot be run or fails; with the first line that it has about an error.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror})") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"{Path(command[0]).name} failed with status {done.returncode}: {lines[0].strip()}")
    return done.stdout
