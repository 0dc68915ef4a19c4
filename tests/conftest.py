"""Fixtures that many tests share."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch is loaded, as the program itself does

from model_patches.loading.cache import default_cache_dir
from model_patches.loading.embedded import default_model_folder


@pytest.fixture(scope="session")
def embedded_model_folder() -> Path:
    """The converted default model; tests never download it."""
    folder = default_model_folder(default_cache_dir())
    if not folder.is_dir():
        pytest.fail(f"the default model is not at {folder}: run `ropewalk fetch-default` first (`make test` does)")
    return folder
