"""What the machine can do, measured beside everything else: figures are shares of it, and only ratios travel."""

import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

LONG_ENOUGH = 0.02  # seconds


def cpu_name() -> str:
    """What the processor calls itself, and the widest of its instructions that matter here."""
    name, flags = platform.machine(), ""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            name = value if key == "model name" else name
            flags = value if key == "flags" else flags
    known = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
    widest = next((label for flag, label in known.items() if flag in flags.split()), None)
    return f"{name}, {widest}" if widest else name


def limits(repetitions: int = 7) -> dict[str, float]:
    """GB/s of reading memory and GFLOP/s of a bfloat16 product, both through torch; medians.

    The product is as large as takes a fiftieth of a second, at most 2,048 rows and columns: where the processor knows
    no bfloat16, torch multiplies a thousand times as slowly as where it does.
    """
    numbers = torch.ones(2**26)
    matrix = torch.ones(64, 64, dtype=torch.bfloat16)
    while len(matrix) < 2048 and _seconds(partial(torch.matmul, matrix, matrix), 3) < LONG_ENOUGH:
        matrix = matrix.repeat(2, 2)
    return {
        "read_gb_s": numbers.nbytes / 1e9 / _seconds(numbers.sum, repetitions),
        "bf16_gf_s": 2 * len(matrix) ** 3 / 1e9 / _seconds(partial(torch.matmul, matrix, matrix), repetitions),
    }


def _seconds(work: Callable[[], object], repetitions: int) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(repetitions))


def told(machine: dict[str, float]) -> str:
    """Both in words."""
    return (
        f"reads {machine['read_gb_s']:.3g} GB/s and multiplies bfloat16 at {machine['bf16_gf_s']:.3g} GFLOP/s through "
        "torch"
    )
