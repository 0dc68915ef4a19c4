"""What a GPU gives, on random weights: `python -m benchmarks.gpu [--shape 1B 7B] [--repetitions 15]`.

Decode steps recorded and not, as a share of what reading weights and cache takes at the bandwidth that torch reaches in
the same run; prefill chunks as a share of its bfloat16 product; re-rotation over prefill; and output tokens a second of
32 requests of 256 + 128 tokens at once, over transformers' continuous batching of the same. Medians; writes gpu.json.
Needs CUDA. The shape `tiny` runs anywhere, unrecorded, and says nothing: it is there to try the program.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from benchmarks.by_length import sizes
from benchmarks.decode_step import Runs, Step
from model_patches.attention import page_size_for
from model_patches.plan import make_plan
from model_patches.recorded import CudaRecorder, DecodeShape
from model_patches.rerotation import PagesToMove, rerotate
from model_patches.rope_config import read_geometry
from service.cache.pages import PageAllocator
from service.core import SamplingParams, Sequence
from service.engine.engine import Engine
from service.engine.runner import ModelRunner
from service.metrics import Metrics
from service.scaling.policy import Policy
from service.scheduler.scheduler import Scheduler

SHAPES: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    "7B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32768},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024},
}
HEADS = {"num_key_value_heads": 8, "max_position_embeddings": 8192}
ROWS, CHUNKS, CACHED, MOVED = (1, 16, 64), (512, 2048, 8192), 1024, 8192
REQUESTS, PROMPT, GENERATED = 32, 256, 128


class NoText:
    """A detokeniser that says nothing."""

    def push(self, _token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(work: Callable[[], object], repetitions: int) -> float:
    """Median, from a device that has nothing to do to one that has nothing left to do."""
    times = []
    for repetition in range(repetitions + 2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if repetition > 1:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def limits(repetitions: int) -> dict[str, float]:
    """GB/s of reading memory and TFLOP/s of a bfloat16 product, both through torch."""
    side = 8192 if torch.cuda.is_available() else 512
    numbers = torch.ones(side, side, 8, dtype=torch.bfloat16, device=device())
    matrix = torch.ones(side, side, dtype=torch.bfloat16, device=device())
    return {
        "read_gb_s": numbers.nbytes / 1e9 / seconds(numbers.sum, repetitions),
        "bf16_tf_s": 2 * side**3 / 1e12 / seconds(partial(torch.matmul, matrix, matrix), repetitions),
    }


def random_model(shape: str) -> Any:
    numbers = SHAPES[shape]
    heads = numbers["hidden_size"] // (64 if shape == "1B" else 128 if shape == "7B" else 32)
    config = LlamaConfig(**numbers, **HEADS, num_attention_heads=heads)
    with device():
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def measure(shape: str, repetitions: int) -> dict[str, Any]:
    """All figures of one shape; times in milliseconds."""
    model, machine = random_model(shape), limits(repetitions)
    config = model.config
    theirs = output_rate(partial(by_transformers, model))
    geometry = read_geometry(config.to_dict())
    head_dim = config.hidden_size // config.num_attention_heads
    page = page_size_for(device(), torch.bfloat16, torch.bfloat16, head_dim, head_dim)
    slots = max(max(ROWS) * (CACHED + page), MOVED, REQUESTS * (PROMPT + GENERATED + page)) + 2 * page
    runs = Runs(model, geometry, slots, fuse=False, page_size=page)
    needed = sizes(runs)
    found: dict[str, Any] = {"machine": machine, "decode": {}, "prefill": {}}
    steps = {rows: Step(f"{rows} rows", rows, 1, CACHED) for rows in ROWS}
    unrecorded = {rows: seconds(partial(runs.forward, step), repetitions) for rows, step in steps.items()}
    if device().type == "cuda":
        runs.model.record_decoding(DecodeShape(runs.layers, [None], [], MOVED, max(ROWS)), CudaRecorder())
        assert runs.model.records_decoding, "see the log for why not"
    for rows, step in steps.items():
        taken = seconds(partial(runs.forward, step), repetitions)
        least = (needed["weight_bytes"] + rows * CACHED * needed["token_bytes"]) / machine["read_gb_s"] / 1e9
        found["decode"][rows] = {
            "ms": 1000 * taken,
            "unrecorded_ms": 1000 * unrecorded[rows],
            "share_of_bandwidth": least / taken,
        }
    for tokens in CHUNKS:
        taken = seconds(partial(runs.forward, Step("chunk", 1, tokens, 0)), repetitions)
        computed = tokens * needed["token_operations"] + tokens**2 // 2 * needed["pair_operations"]
        share = computed / machine["bf16_tf_s"] / 1e12 / taken
        found["prefill"][tokens] = {"ms": 1000 * taken, "share_of_bf16_rate": share}
    found["rerotation_ms"] = 1000 * seconds(partial(move, runs), repetitions)
    found["rerotation_over_prefill"] = found["rerotation_ms"] / found["prefill"][MOVED]["ms"]
    ours = output_rate(partial(by_the_engine, runs, slots // page - 1))
    found["output_tokens_s"] = {"ropewalk": ours, "transformers": theirs, "ratio": ours / theirs}
    return found


def move(runs: Runs) -> None:
    """`MOVED` cached tokens to another plan, in place."""
    geometry = runs.model.geometry
    old, new = (make_plan(geometry, "yarn", factor, geometry.native_length) for factor in (1.25, 1.5))
    pages = torch.arange(MOVED // runs.page_size, device=device())
    rerotate(runs.layers, PagesToMove(pages, pages, pages), old, new, geometry.layout)


def prompts() -> list[list[int]]:
    return [[(7919 * row + place) % 1000 for place in range(PROMPT)] for row in range(REQUESTS)]


def output_rate(generate: Callable[[], None]) -> float:
    """Output tokens a second of all requests; the third of three runs."""
    return REQUESTS * GENERATED / seconds(generate, 1)


def by_transformers(model: Any) -> None:
    """Its own continuous batching, with attention by SDPA, which needs no further package."""
    model.set_attn_implementation("sdpa")
    tokens = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED}
    config = GenerationConfig(do_sample=False, **tokens)
    found = model.generate_batch(inputs=prompts(), generation_config=config, persistent_manager=True)
    assert sum(len(output.generated_tokens) for output in found.values()) == REQUESTS * GENERATED


def by_the_engine(runs: Runs, num_pages: int) -> None:
    """The engine of the server, without HTTP or text."""
    policy = Policy(runs.model.geometry)
    scheduler = Scheduler(
        PageAllocator(num_pages, runs.page_size), max_running=REQUESTS, max_batch_tokens=2048, prefix_caching=False
    )
    engine = Engine(
        ModelRunner(runs.model, runs.layers), scheduler, lambda _: NoText(), Metrics(CollectorRegistry()), 1
    )
    sampling = SamplingParams(max_tokens=GENERATED, temperature=0.0)
    for row, prompt in enumerate(prompts()):
        choice = policy.choose(PROMPT, GENERATED)
        engine.add(Sequence(str(row), prompt, choice, sampling, deliver=lambda _: None))
    while engine.step():
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1B", "7B"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("gpu.json"))
    arguments = parser.parse_args()
    results = {shape: measure(shape, arguments.repetitions) for shape in arguments.shape}
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    arguments.out.write_text(json.dumps({"device": name, "torch": torch.__version__, **results}, indent=1) + "\n")
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
