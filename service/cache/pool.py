"""The memory of the rotated-key cache: one pool of pages for each layer, and how large it is. Knows tensors; does not
know which sequence holds which page."""

from dataclasses import dataclass

import torch

from model_patches.attention import KeyValuePages
from service.errors import StartupError


@dataclass(frozen=True)
class CacheShape:
    """The shape of a cache.

    Attributes:
        layers: attention layers.
        page_size: tokens in one page.
        kv_heads: key (and value) heads of one layer.
        head_dim: dimensions of a head.
        dtype: of keys and values.
    """

    layers: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return 2 * self.layers * self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize


def allocate_pool(shape: CacheShape, num_pages: int, device: torch.device) -> list[KeyValuePages]:
    """Reserve memory for a pool of pages.

    On a CPU the operating system provides the memory only as pages are first written. On CUDA the pages begin as zeros:
    kernels there read whole pages and rely on what they mask being numbers.

    Raises:
        StartupError: the device does not have so much memory.

    Returns:
        One entry for each layer; keys and values are [num_pages, page_size, kv_heads, head_dim].
    """
    size = (num_pages, shape.page_size, shape.kv_heads, shape.head_dim)
    make = torch.zeros if device.type == "cuda" else torch.empty

    def pool() -> torch.Tensor:
        return make(size, dtype=shape.dtype, device=device)

    try:
        return [KeyValuePages(keys=pool(), values=pool()) for _ in range(shape.layers)]
    except RuntimeError as error:  # torch's way of saying that memory is out, on CUDA and on a CPU
        asked = num_pages * shape.page_bytes
        raise StartupError(f"a cache of {asked} bytes does not fit into memory: lower kv-cache-memory") from error
