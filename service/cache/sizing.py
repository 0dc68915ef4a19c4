"""How many pages the cache gets. Knows memory; does not know what is kept in it."""

from pathlib import Path

import psutil
import torch

from service.cache.needs import PageNeeds
from service.cache.pool import CacheShape
from service.errors import StartupError

CPU_SHARE = 0.25  # of the memory that is free; the process, other programs and the file cache need the rest
CONTROL_GROUP = Path("/sys/fs/cgroup")
CUDA_SHARE = 0.85  # of the device memory that is free once the model is loaded


def choose_num_pages(
    shape: CacheShape,
    device: torch.device,
    memory: int | float | None,
    max_length: int,
    *,
    needs: PageNeeds | None = None,
    sharers: int = 1,
) -> int:
    """Pages for a cache.

    Args:
        shape: of the cache.
        device: where it lives.
        memory: bytes to use, or as a float the share of what is free; None for a share that suits the device.
        max_length: tokens of the longest request, which must fit.
        needs: which of its pages each group of layers needs; None where there is one group, which needs all.
        sharers: processes of this machine that make a cache like this one at the same time: a share of a CPU's memory
            is for all of them together, bytes are for each.

    Raises:
        StartupError: the longest request does not fit.
    """
    asked, source = _bytes_to_use(device, memory, sharers)
    num_pages = asked // shape.page_bytes
    needs = needs or PageNeeds(shape.page_size)
    needed = needs.most(max_length)
    if num_pages < needed:
        tokens = needs.tokens(num_pages, max_length)
        raise StartupError(
            f"{source} is {asked} bytes, which holds {tokens} tokens; "
            f"one request of the maximum length {max_length} needs {needed * shape.page_bytes} bytes: "
            "raise kv-cache-memory or lower max-model-len"
        )
    return num_pages


def _bytes_to_use(device: torch.device, memory: int | float | None, sharers: int) -> tuple[int, str]:
    """How many, and what they are, in words."""
    if isinstance(memory, int):
        return memory, "kv-cache-memory"
    if memory is None:
        share, source = (
            CUDA_SHARE if device.type == "cuda" else CPU_SHARE,
            "the share of the free memory that the cache takes",
        )
    else:
        share, source = memory, f"kv-cache-memory, {memory:.4g} of the free memory,"
    return int(_free_memory(device) * share) // (sharers if device.type == "cpu" else 1), source


def _free_memory(device: torch.device) -> float:
    """In bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, _free_container_memory())


def _free_container_memory() -> float:
    """What the control group's limit, as Kubernetes and Docker set it, leaves, in bytes; infinite without a limit.

    In use is its working set: files that the kernel keeps in memory and would give up do not count.
    """
    limit = _read(CONTROL_GROUP / "memory.max")
    if limit in ("", "max"):
        return float("inf")
    given_up = [
        line.split()[1]
        for line in _read(CONTROL_GROUP / "memory.stat").splitlines()
        if line.startswith("inactive_file ")
    ]
    in_use = int(_read(CONTROL_GROUP / "memory.current") or 0) - sum(map(int, given_up))
    return max(0, int(limit) - in_use)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
