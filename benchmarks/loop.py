"""What a step costs beside the model: scheduling, tensors, sampling, text, events.

A runner stands in for the model that lays out the step as the real one does and returns logits made beforehand, so what
is measured is all that the engine's thread does in Python. Run it on an idle machine:

    python benchmarks/loop.py [--rows 1 16 64] [--steps 200] [--profile]
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer

from model_patches.geometry import RopeGeometry
from model_patches.kernels import build as operators
from model_patches.loading.cache import default_cache_dir
from model_patches.loading.source import resolve_model
from model_patches.pages import KeyValuePages
from service import core
from service.cache.pages import PageAllocator
from service.cache.pool import CacheShape, allocate_pool
from service.core import SamplingParams, Sequence
from service.engine import batch
from service.engine.detokenize import text_streams
from service.engine.engine import Engine
from service.metrics import Metrics
from service.scaling.policy import Policy
from service.scheduler.scheduler import Scheduler

VOCABULARY = 49152
PAGE_SIZE = 16
PROMPT = 256
TURNS = 16  # steps with different logits; tokens repeat after them, as those of a text do
STRIDE = 4096  # numbers, whole cache lines
POLICY = Policy(RopeGeometry(rotary_dim=64, theta=1e5, original_length=8192, native_length=8192))


class NoModel:
    """A runner that does everything but compute. It copies no logits: neither greedy nor sampled rows write to them."""

    def __init__(self, layers: list[KeyValuePages], numbers: torch.Tensor) -> None:
        """
        Args:
            layers: of the pool.
            numbers: [n], at least rows × vocabulary + `TURNS` × `STRIDE`; each step's logits begin at another of them,
                so that it chooses other tokens than the one before.
        """
        self._layers = layers
        self._numbers = numbers
        self._turn = 0

    def forward(self, step: Mapping[Sequence, int]) -> torch.Tensor:
        tensors = batch.build(step, self._layers, lambda _: 0, torch.device("cpu"))
        self._turn = (self._turn + 1) % TURNS
        start = self._turn * STRIDE
        return self._numbers[start : start + len(tensors.logits_at) * VOCABULARY].view(-1, VOCABULARY)

    def rerotate(self, rerotation: core.Rerotation) -> None:
        raise AssertionError(rerotation)

    def copy(self, copies: object) -> None:
        raise AssertionError(copies)


def decoding_engine(
    rows: int, sampling: SamplingParams, new_text_stream: Callable[[frozenset[int]], Any], metrics: Any
) -> Engine:
    """An engine whose rows have been prefilled and are about to decode, with the operators that a server has."""
    operators.load()
    tokens = sampling.max_tokens
    pages = PageAllocator(rows * (1 + (PROMPT + tokens) // PAGE_SIZE), PAGE_SIZE)
    layers = allocate_pool(CacheShape(1, PAGE_SIZE, 1, 8, 8, torch.float32), 1, torch.device("cpu"))
    scheduler = Scheduler(pages, max_running=rows, max_batch_tokens=rows * PROMPT)
    # With this spread a distribution has 2.8 nats of entropy, which is about what a text's next token has.
    numbers = 4 * torch.randn(rows * VOCABULARY + TURNS * STRIDE, generator=torch.Generator().manual_seed(0))
    engine = Engine(NoModel(layers, numbers), scheduler, new_text_stream, metrics, 1)
    for row in range(rows):
        prompt = [100 + row] * PROMPT
        engine.add(Sequence(str(row), prompt, POLICY.choose(PROMPT, tokens), sampling, deliver=lambda _: None))
    engine.step()
    return engine


def make_engine(rows: int, sampling: SamplingParams) -> Engine:
    """One with a real detokeniser and real metrics."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(None, cache_dir=default_cache_dir())).backend_tokenizer
    return decoding_engine(rows, sampling, text_streams(tokenizer), Metrics(CollectorRegistry()))


def measure(rows: int, steps: int, sampling: SamplingParams) -> float:
    """Median milliseconds of a step: of the thread's own work, whatever else the machine does."""
    engine, times = make_engine(rows, sampling), []
    for _ in range(steps):
        start = time.thread_time()
        engine.step()
        times.append(time.thread_time() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    kinds = {
        "greedy": SamplingParams(max_tokens=700, temperature=0.0),
        "sampled": SamplingParams(max_tokens=700, temperature=0.8, top_p=0.95, seed=1),
    }
    for name, sampling in kinds.items():
        for rows in arguments.rows:
            print(
                json.dumps({"sampling": name, "rows": rows, "ms": round(measure(rows, arguments.steps, sampling), 3)})
            )
    if arguments.profile:
        engine = make_engine(max(arguments.rows), kinds["greedy"])
        with cProfile.Profile() as profile:
            for _ in range(arguments.steps):
                engine.step()
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)


if __name__ == "__main__":
    main()
