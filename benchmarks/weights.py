"""What the format of the weights costs and saves: time to load, memory, single-stream speed and perplexity.

    python -m benchmarks.weights [--repeats 5] [--documents 4] [--length 2048] [--out benchmarks/weights.json]

Writes a table beside the JSON, as Markdown. int8 and int4 need the extra quant, int4 CUDA; what cannot be run is left
out, and the reason written down. Measure on an idle machine: some ten minutes on two cores.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from model_patches.loading.cache import default_cache_dir
from model_patches.loading.embedded import fetch_default
from service import build
from service.build import InspectedModel, LoadedWeights
from service.cache.pages import PageAllocator
from service.cache.pool import allocate_pool
from service.core import Event, SamplingParams, Sequence, TokenEvent
from service.engine.detokenize import text_streams
from service.engine.engine import Engine
from service.engine.runner import ModelRunner
from service.errors import StartupError
from service.evaluation.driver import Driver
from service.evaluation.texts import builtin_text, documents, tokenize
from service.metrics import Metrics
from service.scheduler.scheduler import Scheduler
from service.settings import Settings

FORMATS: dict[str, dict[str, Any]] = {
    "float32 fused": {"dtype": "float32"},
    "bf16 fused": {"dtype": "bfloat16"},
    "bf16 unfused": {"dtype": "bfloat16", "cpu_operators": False},
    "int8 unfused": {"dtype": "bfloat16", "quantization": "int8"},
    "int4 unfused": {"dtype": "bfloat16", "quantization": "int4"},
}
PROMPT, GENERATED = 128, 128


@dataclass(frozen=True)
class Rig:
    """One model in one format, and a cache of its own."""

    inspected: InspectedModel
    weights: LoadedWeights
    runner: ModelRunner
    pages: PageAllocator

    @classmethod
    def of(cls, inspected: InspectedModel, weights: LoadedWeights, tokens: int) -> "Rig":
        num_pages = 2 * -(-tokens // weights.shape.page_size)
        runner = ModelRunner(weights.model, allocate_pool(weights.shape, num_pages, inspected.device))
        return cls(inspected, weights, runner, PageAllocator(num_pages, weights.shape.page_size))

    def tokens_per_second(self, prompt: list[int]) -> float:
        """Of decoding alone: from the first generated token to the last."""
        times: list[float] = []

        def take(event: Event) -> None:
            if isinstance(event, TokenEvent):
                times.append(time.perf_counter())

        choice = self.inspected.policy.choose(len(prompt), GENERATED)
        scheduler = Scheduler(self.pages, max_running=1, max_batch_tokens=512, prefix_caching=False)
        tokenizer = self.weights.loaded.tokenizer.backend_tokenizer
        engine = Engine(
            *(self.runner, scheduler, text_streams(tokenizer), Metrics(CollectorRegistry())),
            self.weights.shape.page_bytes,
        )
        engine.add(Sequence("-", prompt, choice, SamplingParams(GENERATED, temperature=0.0), take))
        while engine.step():
            pass
        return (len(times) - 1) / (times[-1] - times[0])

    def perplexity(self, texts: list[list[int]]) -> float:
        driver = Driver(self.runner, self.pages, self.weights.loaded.tokenizer.backend_tokenizer)
        choices = [self.inspected.policy.choose(len(text), 1) for text in texts]
        nll = [driver.score(text, choice).nll for text, choice in zip(texts, choices, strict=True)]
        return float(np.exp(np.mean(np.concatenate(nll))))


def measure(settings: Settings, repeats: int, count: int, length: int) -> dict[str, Any]:
    """Medians; the first load is not counted, for it reads the files into the system's cache."""
    inspected = build.inspect(settings)
    load: Callable[[], LoadedWeights] = partial(build.load_weights, settings, inspected)
    weights = load()
    seconds = []
    for _ in range(repeats):
        del weights
        start = time.perf_counter()
        weights = load()
        seconds.append(time.perf_counter() - start)
    rig = Rig.of(inspected, weights, max(length, PROMPT + GENERATED))
    streams = tokenize([builtin_text()], weights.loaded.tokenizer.backend_tokenizer)
    warm_up, *prompts = documents(streams, PROMPT, repeats + 1)
    rig.tokens_per_second(warm_up)
    return {
        "seconds to load": statistics.median(seconds),
        "MiB of weights": weights.bytes / 2**20,
        "tokens per second": statistics.median(rig.tokens_per_second(prompt) for prompt in prompts),
        "perplexity": rig.perplexity(documents(streams, length, count)),
    }


def table(results: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {found['seconds to load']:.2f} | {found['MiB of weights']:.0f} "
        f"| {found['tokens per second']:.1f} | {found['perplexity']:.3f} |"
        for name, found in results["formats"].items()
    ]
    return "\n".join(
        [
            "# Formats of the weights",
            "",
            f"By `python -m benchmarks.weights`: SmolLM2-135M-Instruct on {results['device']} "
            f"({results['threads']} threads). Load: files in the system's cache. Speed: one stream, {PROMPT} tokens of "
            f"prompt and {GENERATED} generated, decoding alone; unfused bf16 is with `--no-cpu-operators`. Perplexity: "
            f"{results['documents']} documents of {results['length']} tokens of Python's language reference. "
            f"Medians of {results['repeats']}.",
            "",
            "| weights | load, s | memory, MiB | tokens/s | perplexity |",
            "|---|---|---|---|---|",
            *rows,
            "",
            *(f"{name}: not run. {reason}." for name, reason in results["not run"].items()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    folder = str(fetch_default(default_cache_dir()))
    results: dict[str, Any] = {
        **{"device": arguments.device, "threads": torch.get_num_threads(), "torch": torch.__version__},
        **{name: getattr(arguments, name) for name in ("repeats", "documents", "length")},
        **{"formats": {}, "not run": {}},
    }
    for name, options in FORMATS.items():
        settings = Settings.model_validate({"model": folder, "device": arguments.device, **options})
        try:
            found = measure(settings, arguments.repeats, arguments.documents, arguments.length)
        except StartupError as error:
            results["not run"][name] = str(error)
            continue
        results["formats"][name] = found
        print(name, json.dumps(found), flush=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(table(results) + "\n")


if __name__ == "__main__":
    main()
