"""The memory of the rotated-key cache: a pool for each layer that a page has room for, and how large it is. Knows
tensors; does not know which sequence holds which page."""

from dataclasses import dataclass

import torch

from model_patches.pages import SCALE_DTYPE, KeyValuePages, PagedTensor
from service.errors import StartupError


@dataclass(frozen=True)
class CacheShape:
    """The shape of a cache.

    Attributes:
        layers: attention layers of which a page holds keys and values.
        page_size: tokens in one page.
        kv_heads: key (and value) heads of one layer.
        key_dim: dimensions of a key.
        value_dim: dimensions of a value.
        dtype: of keys and values.
    """

    layers: int
    page_size: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all its layers: keys, values and, with int8, a scale for each of them."""
        scales = 2 * SCALE_DTYPE.itemsize if self.dtype == torch.int8 else 0
        head_bytes = (self.key_dim + self.value_dim) * self.dtype.itemsize + scales
        return self.layers * self.page_size * self.kv_heads * head_bytes


def allocate_pool(shape: CacheShape, num_pages: int, device: torch.device) -> list[KeyValuePages]:
    """Reserve memory for a pool of pages.

    On a CPU the operating system provides the memory only as pages are first written. On CUDA the pages begin as zeros:
    kernels there read whole pages and rely on what they mask being numbers.

    Raises:
        StartupError: the device does not have so much memory.

    Returns:
        One entry for each layer of a page; keys are [num_pages, page_size, kv_heads, key_dim], values end in value_dim.
    """

    def pool(dim: int) -> PagedTensor:
        size = (num_pages, shape.page_size, shape.kv_heads, dim)
        made = PagedTensor.allocate(size, shape.dtype, device)
        if device.type == "cuda":
            made.zero_()
        return made

    try:
        return [KeyValuePages(pool(shape.key_dim), pool(shape.value_dim)) for _ in range(shape.layers)]
    except RuntimeError as error:  # torch's way of saying that memory is out, on CUDA and on a CPU
        asked = num_pages * shape.page_bytes
        raise StartupError(f"a cache of {asked} bytes does not fit into memory: lower kv-cache-memory") from error
