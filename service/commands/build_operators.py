"""`ropewalk build-operators`: the C++ operators, compiled into the cache folder ahead of a server's start."""

from collections.abc import Mapping
from typing import Any

from model_patches.errors import ModelError
from model_patches.kernels import build
from model_patches.loading.cache import default_cache_dir
from service.errors import StartupError


def build_operators(_: Mapping[str, Any]) -> None:
    """Compile the operators, unless that has been done; takes a minute.

    Raises:
        StartupError: there is no compiler, it fails, or the folder cannot be written.
    """
    try:
        library = build.find_or_build(default_cache_dir())
    except (build.BuildError, ModelError) as error:
        raise StartupError(str(error)) from error
    print(f"the operators are in {library}")
