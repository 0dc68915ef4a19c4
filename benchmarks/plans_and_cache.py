"""What plans and the rotated-key cache cost and save, as ratios in one run, on the engine itself (no HTTP).

    mix          step of a decode batch of 16 under 4 plans, over the same batch under one plan
    re-rotation  moving 8,192 cached tokens to the next plan, over a prefill of them
    prefix       first token of a 7,900-token prompt: again under the same plan, and under another with re-use across
                 plans, over the first time
    memory       resident memory of the process against tokens held

    python benchmarks/plans_and_cache.py [--repeats 5] [--out benchmarks/plans_and_cache.json]

Measure on an idle machine: about ten minutes on two cores.
"""

import argparse
import json
import pydoc_data.topics
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from prometheus_client import CollectorRegistry

from model_patches.attention import page_size_for
from model_patches.loading.cache import default_cache_dir
from model_patches.loading.embedded import fetch_default
from model_patches.loading.load import LoadedModel, load_model
from model_patches.patch import PatchedModel
from model_patches.rope_config import read_geometry
from service.cache.pages import PageAllocator
from service.cache.pool import CacheShape, allocate_pool
from service.core import PageMove, Rerotation, SamplingParams, Sequence
from service.engine.detokenize import text_streams
from service.engine.engine import Engine
from service.engine.runner import ModelRunner
from service.metrics import Metrics
from service.scaling.policy import Policy, RopeWish
from service.scheduler.scheduler import Scheduler

ROWS, CONTEXT, STEPS, WARM_UP = 16, 512, 220, 20
FACTORS = (1.0, 1.25, 1.5, 2.0)
NUM_PAGES = 4096


@dataclass
class Rig:
    """One model and one pool; engines over them come and go."""

    loaded: LoadedModel
    device: torch.device

    def __post_init__(self) -> None:
        geometry = read_geometry(self.loaded.config)
        self.policy = Policy(geometry)
        model = PatchedModel(self.loaded.model, geometry)
        page_size = page_size_for(self.device, model.dtype, model.dtype, model.key_dim, model.value_dim)
        shape = CacheShape(model.layers, page_size, model.kv_heads, model.key_dim, model.value_dim, model.dtype)
        self.num_pages = NUM_PAGES * 16 // page_size
        self.runner = ModelRunner(model, allocate_pool(shape, self.num_pages, self.device))
        self.pages = PageAllocator(self.num_pages, page_size)
        self.page_bytes = shape.page_bytes

    def engine(self, *, prefix_caching: bool) -> Engine:
        scheduler = Scheduler(self.pages, max_running=64, max_batch_tokens=512, prefix_caching=prefix_caching)
        tokenizer = self.loaded.tokenizer.backend_tokenizer
        return Engine(self.runner, scheduler, text_streams(tokenizer), Metrics(CollectorRegistry()), self.page_bytes)

    def sequence(self, prompt: list[int], max_tokens: int, wish: RopeWish | None = None) -> Sequence:
        choice = self.policy.choose(len(prompt), max_tokens, wish)
        return Sequence("-", prompt, choice, SamplingParams(max_tokens, temperature=0.0), deliver=lambda _: None)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def timed(work: Callable[[], Any], rig: Rig) -> float:
    rig.wait()
    start = time.perf_counter()
    work()
    rig.wait()
    return time.perf_counter() - start


def first_token(rig: Rig, engine: Engine, sequence: Sequence) -> float:
    """Seconds from admission to the only token."""
    engine.add(sequence)

    def run() -> None:
        while engine.step():
            pass

    return timed(run, rig)


def mix(rig: Rig, text: list[int]) -> dict[str, Any]:
    """Two batches of the same shape, stepped in turn."""
    engines = {"one plan": rig.engine(prefix_caching=False), "four plans": rig.engine(prefix_caching=False)}
    for name, engine in engines.items():
        for row in range(ROWS):
            factor = 1.0 if name == "one plan" else FACTORS[row % len(FACTORS)]
            prompt = text[row * CONTEXT : (row + 1) * CONTEXT]
            engine.add(rig.sequence(prompt, STEPS + WARM_UP + 100, RopeWish(factor=factor, growth="stop")))
        while any(
            sequence.num_uncomputed > 1 for sequence in engine.scheduler.running + list(engine.scheduler.waiting)
        ):
            engine.step()
    times: dict[str, list[float]] = {name: [] for name in engines}
    for step in range(STEPS + WARM_UP):
        for name in sorted(engines, reverse=bool(step % 2)):
            times[name].append(timed(engines[name].step, rig))
    for engine in engines.values():
        for sequence in list(engine.scheduler.running):
            engine.cancel(sequence)
    one, four = (times[name][WARM_UP:] for name in ("one plan", "four plans"))
    low, high = bootstrap(one, four)
    return {
        "steps": STEPS,
        "one plan, ms": 1e3 * statistics.median(one),
        "four plans, ms": 1e3 * statistics.median(four),
        "ratio": statistics.median(four) / statistics.median(one),
        "95 % interval": [low, high],
    }


def bootstrap(one: list[float], four: list[float], draws: int = 4000) -> tuple[float, float]:
    """95 % interval of the ratio of medians, over steps drawn in pairs."""
    generator = random.Random(0)
    pairs = list(zip(one, four, strict=True))
    ratios = []
    for _ in range(draws):
        drawn = generator.choices(pairs, k=len(pairs))
        ratios.append(statistics.median(b for _, b in drawn) / statistics.median(a for a, _ in drawn))
    ratios.sort()
    return ratios[draws // 40], ratios[-draws // 40]


def rerotation(rig: Rig, text: list[int], repeats: int) -> dict[str, Any]:
    """There and back between the first two rungs, in place, and copied."""
    tokens = rig.policy.native_length
    prefill = first_token(rig, rig.engine(prefix_caching=False), rig.sequence(text[:tokens], 1, RopeWish(factor=1.25)))
    sequence = rig.sequence(text[:1], 1)
    native, longer = (rig.policy.choose(1, 1, RopeWish(factor=factor)).plan for factor in FACTORS[:2])
    count = -(-tokens // rig.pages.page_size)

    def move(offset: int, old: Any, new: Any) -> float:
        moves = [PageMove(page, page + offset, page) for page in range(count)]
        return timed(lambda: rig.runner.rerotate(Rerotation(sequence, old, new, moves, tokens)), rig)

    in_place = [move(0, *plans) for _ in range(repeats) for plans in ((native, longer), (longer, native))]
    copied = [move(count, native, longer) for _ in range(repeats)]
    return {
        "tokens": tokens,
        "prefill, s": prefill,
        "in place, s": statistics.median(in_place),
        "copied, s": statistics.median(copied),
        "in place over prefill": statistics.median(in_place) / prefill,
    }


def prefix(rig: Rig, text: list[int], repeats: int) -> dict[str, Any]:
    """A long prompt three times: new, again, and under another plan."""
    engine, length = rig.engine(prefix_caching=True), 7900
    across = RopeWish(factor=1.25, prefix_reuse="rerotate")
    times: dict[str, list[float]] = {"first": [], "again": [], "across plans": []}
    for repeat in range(repeats):
        prompt = text[repeat * 1000 : repeat * 1000 + length]
        for name, wish in (("first", None), ("again", None), ("across plans", across)):
            times[name].append(first_token(rig, engine, rig.sequence(prompt, 1, wish)))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        **{f"{name}, s": value for name, value in medians.items()},
        "again over first": medians["again"] / medians["first"],
        "across plans over first": medians["across plans"] / medians["first"],
    }


def memory(rig: Rig, text: list[int]) -> list[dict[str, float]]:
    """Resident memory with so many tokens held by running requests, each under the native length."""
    engine, readings = rig.engine(prefix_caching=False), []
    for _ in range(5):
        held = sum(sequence.num_computed for sequence in engine.scheduler.running)
        pool = rig.pages.num_used * rig.page_bytes
        readings.append({"tokens": held, "MiB of pages": pool / 2**20, "MiB resident": resident()})
        sequence = rig.sequence(text[:4000], 1000)
        engine.add(sequence)
        while sequence.num_uncomputed > 1:
            engine.step()
    for sequence in list(engine.scheduler.running):
        engine.cancel(sequence)
    return readings


def resident() -> float:
    return float(psutil.Process().memory_info().rss / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rig = Rig(load_model(fetch_default(default_cache_dir()), dtype=torch.bfloat16, device=device), device)
    topics = pydoc_data.topics.topics
    text = rig.loaded.tokenizer("\n\n".join(topics[name] for name in sorted(topics))[:150_000])["input_ids"]
    results: dict[str, Any] = {"device": str(device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    for name, measure in {
        "memory": lambda: memory(rig, text),
        "mix": lambda: mix(rig, text),
        "rerotation": lambda: rerotation(rig, text, arguments.repeats),
        "prefix": lambda: prefix(rig, text, arguments.repeats),
    }.items():
        results[name] = measure()
        print(name, json.dumps(results[name], indent=1), flush=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
