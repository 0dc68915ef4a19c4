"""How many tokens fit on a GPU, and how fast it could be at most: computed from published configs and data sheets.

Nothing is measured and no GPU is needed. The cache is counted by the server's own `CacheShape`; the formulas, and what
they leave out, are in docs/capacity.md.

    python benchmarks/capacity.py                       # the table of docs/capacity.md
    python benchmarks/capacity.py MODEL/config.json     # the same for models of Llama's shape
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from service.cache.pool import CacheShape
from service.cache.sizing import CUDA_SHARE

BYTES = 2  # of a number, bfloat16
RUNTIME = 1.5e9  # bytes that CUDA, its libraries and NCCL take for themselves: an assumption
CONTEXTS = (8_192, 32_768, 131_072)


@dataclass(frozen=True)
class Gpu:
    """Of NVIDIA's data sheets.

    Attributes:
        memory: bytes, GB as 10^9.
        bandwidth: bytes a second.
        compute: bfloat16 operations a second, dense.
    """

    name: str
    memory: float
    bandwidth: float
    compute: float


GPUS = (
    Gpu("L40S", 48e9, 0.864e12, 362e12),
    Gpu("H100 SXM", 80e9, 3.35e12, 989e12),
    Gpu("H200 SXM", 141e9, 4.8e12, 989e12),
)


@dataclass(frozen=True)
class Model:
    """A dense model of Llama's shape, of its config.json.

    Attributes:
        biased: whether queries, keys and values have biases.
        tied: whether the head is the embedding.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    biased: bool = False

    @property
    def computing(self) -> int:
        """Weights that every token is multiplied with: all but the embedding, the head once."""
        projected = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = self.hidden * (projected + self.heads * self.head_dim) + projected * self.biased
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """Bytes."""
        embedding = 0 if self.tied else self.vocabulary * self.hidden
        return (self.computing + embedding) * BYTES

    def token_bytes(self, gpus: int) -> float:
        """Bytes of cache that one token takes on each of so many GPUs."""
        shape = CacheShape(self.layers, 16, self.kv_heads // gpus, self.head_dim, self.head_dim, torch.bfloat16)
        return shape.page_bytes / shape.page_size

    def splits(self, gpus: int) -> bool:
        """Whether `--tensor-parallel` takes so many."""
        return self.kv_heads % gpus == 0

    def cached_tokens(self, gpu: Gpu, gpus: int) -> int:
        """Tokens that the cache holds in all; below 0 where the weights do not fit."""
        free = gpu.memory - RUNTIME - self.weights / gpus
        return int(CUDA_SHARE * free / self.token_bytes(gpus))

    def decode_rate(self, gpu: Gpu, gpus: int, context: int, requests: int) -> float:
        """Tokens a second at most, of all requests together, each with so many tokens cached."""
        read = self.computing * BYTES / gpus + requests * context * self.token_bytes(gpus)
        attended = 4 * context * self.heads * self.head_dim * self.layers
        computed = requests * (2 * self.computing + attended) / gpus
        return requests / max(read / gpu.bandwidth, computed / gpu.compute)

    def prefill_seconds(self, gpu: Gpu, gpus: int, context: int) -> float:
        """Seconds at least, of a prompt of so many tokens."""
        head = self.vocabulary * self.hidden  # once, for the last token
        linear = 2 * (self.computing - head) * context
        attended = 2 * context**2 * self.heads * self.head_dim * self.layers  # half of all pairs, two products
        return (linear + attended) / (gpus * gpu.compute)


MODELS = (
    Model("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49_152, tied=True),
    Model("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256),
    Model("Qwen2.5-32B", 64, 5120, 27_648, 40, 8, 128, 152_064, biased=True),
    Model("Llama-3.3-70B", 80, 8192, 28_672, 64, 8, 128, 128_256),
)


def read_model(file: Path) -> Model:
    """A model of Llama's shape, from its config.json."""
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    return Model(
        name=file.resolve().parent.name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        biased=config.get("attention_bias", config["model_type"] == "qwen2"),
    )


def rows(model: Model, gpu: Gpu) -> Iterator[str]:
    """A row for each number of GPUs that holds the model and a request of the shortest context, up to the first that
    holds four of the longest."""
    for gpus in filter(model.splits, (1, 2, 4, 8)):
        tokens = model.cached_tokens(gpu, gpus)
        if tokens < CONTEXTS[0]:
            continue
        cells = [model.name, f"{gpus} x {gpu.name}", f"{tokens:,}"]
        for context in CONTEXTS:
            fit = tokens // context
            if fit == 0:
                cells.append("")
                continue
            alone, full = (model.decode_rate(gpu, gpus, context, requests) for requests in (1, min(fit, 64)))
            prefill = model.prefill_seconds(gpu, gpus, context)
            cells.append(f"{fit:,}; {alone:,.0f}, {full:,.0f}; {prefill:.2g}")
        yield f"| {' | '.join(cells)} |"
        if tokens >= 4 * CONTEXTS[-1]:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG", help="config.json files of Llama's shape")
    models = [*map(read_model, parser.parse_args().configs)] or MODELS
    print("| model | weights, GB | cache of a token, KiB |\n|---|---|---|")
    for model in models:
        print(f"| {model.name} | {model.weights / 1e9:.3g} | {model.token_bytes(1) / 2**10:.4g} |")
    print(f"\n| model | GPUs | cached tokens | {' | '.join(f'at {context:,}' for context in CONTEXTS)} |")
    print(f"|---|---|---|{'---|' * len(CONTEXTS)}")
    for model in models:
        for gpu in GPUS:
            for row in rows(model, gpu):
                print(row)


if __name__ == "__main__":
    main()
