"""The attention operator against torch's own attention over the same pages: ratios, bytes and operations a second.

    python benchmarks/operators.py [--repetitions 30] [--threads N] [--deterministic]

Both take the same step in turn, so that what else runs on the machine meets both alike; figures are medians, and the
shortest beside them. Layers are many, so that keys come from memory as they do under a model. Only ratios travel
between machines. Without a compiler there is nothing to measure.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from model_patches.attention import PagedBatch, attend_sdpa
from model_patches.kernels import build, ops
from model_patches.pages import KeyValuePages, PagedTensor

HEADS, KV_HEADS, DIM, PAGE_SIZE, SCALE = 9, 3, 64, 16, 0.125
"""Of SmolLM2-135M."""
POOL_BYTES = 256 << 20
"""Of all layers, more than any cache but the largest servers' holds."""


@dataclass(frozen=True)
class Load:
    """One step: so many sequences, each with so many new tokens after so many cached ones."""

    name: str
    sequences: int
    new: int
    past: int

    @property
    def bytes_read(self) -> int:
        """Keys and values of one layer, bfloat16, each once."""
        return self.sequences * (self.new + self.past) * KV_HEADS * DIM * 2 * 2

    @property
    def operations(self) -> int:
        """Multiplications and additions of one layer, of what is not masked."""
        seen = self.new * self.past + self.new * (self.new + 1) // 2
        return self.sequences * seen * HEADS * DIM * 2 * 2


LOADS = [
    Load("1 row, 1,024 cached", 1, 1, 1023),
    Load("1 row, 8,192 cached", 1, 1, 8191),
    Load("16 rows, 384 cached each", 16, 1, 383),
    Load("512 tokens after 0", 1, 512, 0),
    Load("512 tokens after 3,500", 1, 512, 3500),
    Load("512 tokens after 7,400", 1, 512, 7400),
    Load("2,048 tokens after 0", 1, 2048, 0),
    Load("2,048 tokens after 2,048", 1, 2048, 2048),
    Load("2,048 tokens after 6,000", 1, 2048, 6000),
]


def batch_of(load: Load) -> PagedBatch:
    """Pages in random order, as many layers of them as make the pool larger than a cache."""
    length = load.new + load.past
    per_sequence = -(-length // PAGE_SIZE)
    pages = load.sequences * per_sequence
    layers = max(2, min(30, POOL_BYTES // load.bytes_read))
    shape = (pages, PAGE_SIZE, KV_HEADS, DIM)
    pool = [KeyValuePages(*(PagedTensor(torch.randn(shape).bfloat16()) for _ in range(2))) for _ in range(layers)]
    table = torch.randperm(pages).to(torch.int32).view(load.sequences, per_sequence)
    lengths = [length] * load.sequences
    queries = [load.new] * load.sequences
    return PagedBatch(
        layers=pool,
        query_lengths=queries,
        key_lengths=lengths,
        slots=torch.empty(0, dtype=torch.int64),
        block_table=table,
        cu_seq_q=torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        cu_seq_k=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        seqused_k=torch.tensor(lengths, dtype=torch.int32),
    )


def seconds(attend: Callable[[KeyValuePages], torch.Tensor], batch: PagedBatch) -> float:
    """One layer's, over all layers in turn."""
    start = time.perf_counter()
    for pages in batch.layers:
        attend(pages)
    return (time.perf_counter() - start) / len(batch.layers)


def measure(load: Load, repetitions: int, deterministic: bool) -> str:
    """One line of the table."""
    batch = batch_of(load)
    query = torch.randn(load.sequences * load.new, HEADS, DIM).bfloat16()

    def ours(pages: KeyValuePages) -> torch.Tensor:
        table, lengths = batch.block_table, batch.seqused_k
        return ops.paged_attention(query, pages, batch.cu_seq_q, lengths, table, SCALE, deterministic=deterministic)

    def theirs(pages: KeyValuePages) -> torch.Tensor:
        return attend_sdpa(query, pages, batch, SCALE, None)

    times = [(seconds(ours, batch), seconds(theirs, batch)) for _ in range(repetitions + 1)][1:]
    own, other = ([pair[i] for pair in times] for i in (0, 1))
    best = min(own)
    return (
        f"| {load.name} | {1e6 * statistics.median(own):,.0f} | {1e6 * statistics.median(other):,.0f} "
        f"| {statistics.median(a / b for a, b in times):.2f} | {best / min(other):.2f} "
        f"| {load.bytes_read / best / 1e9:.1f} | {load.operations / best / 1e9:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--deterministic", action="store_true", help="also independent of the chunks of a prompt")
    given = parser.parse_args()
    if not build.load():
        raise SystemExit("no operators: nothing to measure")
    torch.set_num_threads(given.threads)
    print(f"{ops.current_level().name}, {given.threads} threads, medians of {given.repetitions}; one layer\n")
    print("| load | operator µs | torch µs | ratio (median) | ratio (shortest) | GB/s | GF/s |")
    print("|---|---|---|---|---|---|---|")
    with torch.inference_mode():
        for load in LOADS:
            repetitions = given.repetitions if load.new == 1 else max(3, given.repetitions // 5)
            print(measure(load, repetitions, given.deterministic), flush=True)


if __name__ == "__main__":
    main()
