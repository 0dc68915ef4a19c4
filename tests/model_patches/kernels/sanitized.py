"""What sanitize.sh runs: `build` makes the instrumented library and prints its path, `run LIBRARY` tests with it."""

import sys
from pathlib import Path

import pytest

from model_patches.kernels import build
from model_patches.loading.cache import default_cache_dir

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
TESTS = (
    *(f"tests/model_patches/kernels/test_{of}.py" for of in ("attention", "rotary", "linear", "layer", "sampling")),
    *("tests/model_patches/test_fused.py", "tests/service/engine/test_sampler.py"),
)


def run(library: Path) -> int:
    """The operators' tests, over a library that is built already; returns pytest's exit status."""
    own = build.find_or_build

    def instrumented(folder: Path, extra_flags: tuple[str, ...] = ()) -> Path:
        return own(folder, extra_flags) if extra_flags else library

    build.find_or_build = instrumented
    return pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", *TESTS])


if __name__ == "__main__":
    if sys.argv[1:] == ["build"]:
        print(build.find_or_build(default_cache_dir(), FLAGS))
    else:
        sys.exit(run(Path(sys.argv[2])))
