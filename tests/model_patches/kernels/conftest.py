"""The operators, built where they are not yet; without a compiler these tests are skipped with the reason."""

from collections.abc import Iterator

import pytest
import torch

from model_patches.errors import CacheFolderError
from model_patches.kernels import ops
from model_patches.kernels.build import BuildError, find_or_build
from model_patches.loading.cache import default_cache_dir


@pytest.fixture(scope="session")
def _library() -> str:
    try:
        return str(find_or_build(default_cache_dir()))
    except (BuildError, CacheFolderError) as error:
        pytest.skip(f"no C++ operators: {error}")


@pytest.fixture
def operators(_library: str) -> Iterator[None]:
    """Loaded; threads and instruction set are as before once a test is over."""
    torch.ops.load_library(_library)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    ops.limit_level(max(ops.Level))
