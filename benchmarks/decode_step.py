"""One step of the embedded model, fused over unfused: `python -m benchmarks.decode_step`.

For decode steps of several numbers of rows and prefill chunks of several lengths: milliseconds of both, interleaved,
the minimum and the median, and what the machine itself can do in the same run: how fast it reads memory, how fast it
multiplies bfloat16 matrices. Then a profile of the fused step: each kind of operator alone over the same shapes. Other
processes spoil medians; minima less. Writes decode_step.json and decode_step.md.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import cpu_name, limits, told
from model_patches.attention import PagedBatch
from model_patches.geometry import RopeGeometry
from model_patches.loading.cache import default_cache_dir
from model_patches.loading.checkpoint import read_config
from model_patches.loading.load import load_model
from model_patches.loading.source import resolve_model
from model_patches.pages import KeyValuePages, PagedTensor
from model_patches.patch import PatchedModel
from model_patches.plan import make_plan
from model_patches.rope_config import read_geometry
from service.build import multiplies_slowly

DECODE_ROWS = (1, 4, 16, 64)
CHUNKS = (128, 512, 2048)


@dataclass(frozen=True)
class Step:
    """What one forward pass takes.

    Attributes:
        name: in the table.
        sequences: how many.
        tokens: of each, in this step.
        past: tokens of each that are cached already.
    """

    name: str
    sequences: int
    tokens: int
    past: int


def steps(past: int) -> list[Step]:
    decode = [Step(f"decode, {rows} rows of {past} cached", rows, 1, past) for rows in DECODE_ROWS]
    return decode + [Step(f"prefill chunk of {tokens}", 1, tokens, 0) for tokens in CHUNKS]


class Runs:
    """One model, patched, over a pool of its own."""

    def __init__(self, model: Any, geometry: RopeGeometry, slots: int, *, fuse: bool, page_size: int = 16) -> None:
        """
        Args:
            model: of transformers, bfloat16.
            geometry: of it.
            slots: tokens that the pool holds.
            fuse: whether layers may be fused.
            page_size: tokens in a page.
        """
        self.model = PatchedModel(model, geometry, fuse=fuse)
        self.page_size = page_size
        self.row = self.model.plan_row(make_plan(geometry, "default", 1.0, geometry.native_length))
        shape = (slots // page_size, page_size, self.model.kv_heads, self.model.key_dim)
        self.layers = []
        for _ in range(self.model.layers):
            pages = [PagedTensor.allocate(shape, torch.bfloat16, self.model.device) for _ in range(2)]
            for tensor in pages:
                tensor.data.normal_()
            self.layers.append(KeyValuePages(*pages))

    @classmethod
    def of_embedded(cls, slots: int, *, fuse: bool) -> "Runs":
        """The embedded model on the CPU."""
        folder = resolve_model(None, cache_dir=default_cache_dir())
        loaded = load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
        return cls(loaded.model, read_geometry(read_config(folder)), slots, fuse=fuse)

    def forward(self, step: Step) -> torch.Tensor:
        with self.model.device:
            return self._forward(step)

    def _forward(self, step: Step) -> torch.Tensor:
        length, page_size = step.past + step.tokens, self.page_size
        pages = -(-length // page_size)
        table = torch.arange(step.sequences * pages, dtype=torch.int32).view(step.sequences, pages)
        positions = torch.arange(step.past, length).repeat(step.sequences)
        sequence = torch.arange(step.sequences).repeat_interleave(step.tokens)
        slots = table[sequence, positions // page_size].long() * page_size + positions % page_size
        cu_seq_q = torch.arange(0, step.sequences + 1, dtype=torch.int32) * step.tokens
        lengths = torch.full((step.sequences,), length, dtype=torch.int32)
        batch = PagedBatch(
            layers=self.layers,
            query_lengths=[step.tokens] * step.sequences,
            key_lengths=[length] * step.sequences,
            slots=slots,
            block_table=table,
            cu_seq_q=cu_seq_q,
            cu_seq_k=torch.arange(0, step.sequences + 1, dtype=torch.int32) * length,
            seqused_k=lengths,
        )
        token_ids = torch.arange(len(positions)) * 7919 % self.model.model.config.vocab_size
        plan_rows = torch.full_like(positions, self.row)
        return self.model.forward(token_ids, positions, plan_rows, cu_seq_q[1:].long() - 1, batch)


def interleaved(runs: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each, taking turns: the minimum and the median."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repetitions):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: {"min": min(values), "median": statistics.median(values)} for name, values in times.items()}


def profile(runs: Runs, step: Step, repetitions: int) -> dict[str, float]:
    """Milliseconds, at best, of each kind of operator alone over all layers of a step."""
    config, rows = runs.model.model.config, step.sequences * step.tokens
    hidden, mlp, dim = config.hidden_size, config.intermediate_size, runs.model.key_dim
    attended = config.num_attention_heads * dim
    joined = attended + 2 * config.num_key_value_heads * dim
    shapes = {"qkv": (joined, hidden), "output": (hidden, attended)}
    shapes |= {"gate, up": (2 * mlp, hidden), "down": (hidden, mlp)}
    kernels = torch.ops.ropewalk
    parts: dict[str, Callable[[], Any]] = {}

    def products(outputs: int, inputs: int, count: int, rows: int) -> Callable[[], None]:
        depth, panels = -(-inputs // 32) * 32, -(-outputs // 32)
        memory = kernels.reserve(count * panels * depth * 64).view(torch.bfloat16).view(count, panels, depth * 32)
        memory.fill_(0.01)
        x = torch.ones(rows, inputs, dtype=torch.bfloat16)

        def run() -> None:
            for packed in memory:
                kernels.packed_linear(x, packed, None, outputs, torch.bfloat16)

        return run

    for name, (outputs, inputs) in shapes.items():
        parts[f"product {name}"] = products(outputs, inputs, runs.model.layers, rows)
    parts["product head"] = products(config.vocab_size, hidden, 1, step.sequences)
    query = torch.ones(rows, config.num_attention_heads, dim, dtype=torch.bfloat16)
    cu_seq_q = torch.arange(0, step.sequences + 1, dtype=torch.int32) * step.tokens
    lengths = torch.full((step.sequences,), step.past + step.tokens, dtype=torch.int32)
    pages = -(-(step.past + step.tokens) // runs.page_size)
    table = torch.arange(step.sequences * pages, dtype=torch.int32).view(step.sequences, pages)

    def attention() -> None:
        for layer in runs.layers:
            arguments = (query, layer.keys.data, None, layer.values.data, None, cu_seq_q, lengths, table)
            kernels.paged_attention(*arguments, dim**-0.5, 0, 0.0, None, None, False)

    parts["attention"] = attention
    parts["whole step"] = lambda: runs.forward(step)
    return {name: times["min"] for name, times in interleaved(parts, repetitions).items()}


def measure(repetitions: int, past: int) -> dict[str, Any]:
    """The machine's limits, the times of all steps fused and unfused, the profiles of three fused ones.

    Unfused steps are left out where torch multiplies so slowly that they would take minutes.
    """
    slots = max(max(DECODE_ROWS) * (past + 16), max(CHUNKS)) + 16
    machine = limits(repetitions)
    ways = [True] if multiplies_slowly(torch.device("cpu"), torch.bfloat16) else [True, False]
    runs = {"fused" if fuse else "unfused": Runs.of_embedded(slots, fuse=fuse) for fuse in ways}
    results: dict[str, Any] = {"machine": machine, "steps": {}, "profiles": {}}
    for step in steps(past):
        results["steps"][step.name] = interleaved(
            {name: partial(way.forward, step) for name, way in runs.items()}, repetitions
        )
    for step in (steps(past)[0], steps(past)[2], steps(past)[-2]):
        results["profiles"][step.name] = profile(runs["fused"], step, repetitions)
    return results


def report(results: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    machine, steps, profiles = results["machine"], results["steps"], results["profiles"]
    lines = [
        f"{os.cpu_count()} cores ({cpu_name()}), torch {torch.__version__}, bfloat16, SmolLM2-135M-Instruct. The "
        f"machine {told(machine)}.",
        "",
        "| step | fused ms, min / median | unfused ms, min / median | ratio of medians |",
        "|---|---|---|---|",
    ]
    for name, times in steps.items():
        ours, theirs = times["fused"], times.get("unfused")
        compared = ["", ""]
        if theirs is not None:
            compared = [f"{theirs['min']:.1f} / {theirs['median']:.1f}", f"{theirs['median'] / ours['median']:.2f}"]
        lines.append("| " + " | ".join([name, f"{ours['min']:.1f} / {ours['median']:.1f}", *compared]) + " |")
    lines += [
        "",
        "Milliseconds of a fused step, at best, and of each kind of operator alone over all layers. Alone, each layer "
        "takes a call from Python that threads have to wake up for, which a step is only once, so the parts of a short "
        "step come to more than the whole.",
        "",
    ]
    lines += ["| | " + " | ".join(profiles) + " |", "|---" * (1 + len(profiles)) + "|"]
    for part in next(iter(profiles.values())):
        lines.append(f"| {part} | " + " | ".join(f"{parts[part]:.2f}" for parts in profiles.values()) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--past", type=int, default=256, help="cached tokens of each decoding sequence")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for decode_step.json and .md")
    arguments = parser.parse_args()
    results = measure(arguments.repetitions, arguments.past)
    (arguments.out / "decode_step.json").write_text(json.dumps(results, indent=1) + "\n")
    (arguments.out / "decode_step.md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    main()
