"""`ropewalk fetch-default`: the embedded default model, downloaded and converted."""

from collections.abc import Mapping
from typing import Any

from model_patches.errors import ModelError
from model_patches.loading import embedded
from model_patches.loading.cache import default_cache_dir
from service.errors import StartupError


def fetch_default(_: Mapping[str, Any]) -> None:
    """Download and convert the embedded default model, unless that has been done.

    Raises:
        StartupError: it cannot be had.
    """
    try:
        folder = embedded.fetch_default(default_cache_dir())
    except ModelError as error:
        raise StartupError(str(error)) from error
    print(f"the default model is in {folder}")
