"""What a growth step costs in quality, on real text at the real crossing of the embedded model's native length.

For each passage: cache tokens under one plan, move their keys to the next, score the tokens that follow under it, and
compare with a fresh prefill under the new plan (mean Kullback-Leibler divergence from it, in nats, and mean negative
log-likelihood). Beside it: the last tokens computed again after the move, and stale keys, which nothing serves.

    python benchmarks/growth.py [--passages 20] [--out benchmarks/growth.json]

Takes a minute or two for each passage on two cores; resumes from what the output file has.
"""

import argparse
import json
import pydoc_data.topics
import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from model_patches.attention import PagedBatch
from model_patches.geometry import RopeGeometry
from model_patches.loading.cache import default_cache_dir
from model_patches.loading.embedded import fetch_default
from model_patches.loading.load import load_model
from model_patches.patch import PatchedModel
from model_patches.plan import PositionPlan, make_plan
from model_patches.rerotation import PagesToMove, rerotate
from model_patches.rope_config import read_geometry
from service.cache.pool import CacheShape, allocate_pool

PAGE_SIZE = 16
SCORED = 256
REFRESHED = (256,)
STEPS = {  # (old factor, tokens cached): the new factors, each with its share of the passages
    (1.0, 8192): {1.25: 0.5, 2.0: 1.0},
    (1.25, 10240): {1.5: 0.1},
    (1.5, 12288): {2.0: 0.1},
}


@dataclass
class Cache:
    """A model and room for two sequences of at most so many tokens."""

    model: PatchedModel
    longest: int

    def __post_init__(self) -> None:
        model = self.model
        self.pages_each = -(-self.longest // PAGE_SIZE)
        shape = CacheShape(model.layers, PAGE_SIZE, model.kv_heads, model.key_dim, model.value_dim, model.dtype)
        self.layers = allocate_pool(shape, 2 * self.pages_each, model.device)

    def run(self, tokens: list[int], start: int, plan: PositionPlan, sequence: int, scored: int) -> torch.Tensor:
        """Compute tokens[start:] into a sequence's pages; log-probabilities after each of the last `scored`."""
        count, end = len(tokens) - start, len(tokens)
        first_page = sequence * self.pages_each
        positions = torch.arange(start, end)
        cumulative = torch.tensor([0, count], dtype=torch.int32)
        batch = PagedBatch(
            layers=self.layers,
            query_lengths=[count],
            key_lengths=[end],
            slots=first_page * PAGE_SIZE + positions,
            block_table=torch.arange(first_page, first_page + self.pages_each, dtype=torch.int32)[None],
            cu_seq_q=cumulative,
            cu_seq_k=torch.tensor([0, end], dtype=torch.int32),
            seqused_k=torch.tensor([end], dtype=torch.int32),
        )
        rows = torch.full((count,), self.model.plan_row(plan))
        at = torch.arange(count - scored, count)
        return self.model.forward(torch.tensor(tokens[start:]), positions, rows, at, batch).log_softmax(dim=-1)

    def move(self, tokens: int, old: PositionPlan, new: PositionPlan) -> None:
        """Copy sequence 0 to sequence 1, its keys re-rotated."""
        numbers = torch.arange(-(-tokens // PAGE_SIZE))
        rerotate(self.layers, PagesToMove(numbers, numbers + self.pages_each, numbers), old, new, "half")


def passages(tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Token ids of real texts, none twice: in turn the language reference and the sources of the standard library."""
    topics = pydoc_data.topics.topics
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_paths()["stdlib"])
    code = "\n\n".join(
        path.read_text() for path in sorted(library.glob("[a-t]*.py"), key=lambda p: -p.stat().st_size)[:40]
    )
    cut = [
        [ids[start : start + length] for start in range(0, len(ids) - length, length)]
        for ids in (tokenizer(text)["input_ids"] for text in (prose, code))
    ]
    yield from (passage for pair in zip_longest(*cut) for passage in pair if passage is not None)


def measure(
    cache: Cache,
    tokens: list[int],
    old: PositionPlan,
    news: Sequence[PositionPlan],
    length: int,
    *,
    scored: int = SCORED,
    refreshed: Sequence[int] = REFRESHED,
) -> list[dict[str, float]]:
    """Steps from one plan to others on one passage, which is at least length + scored + 1 tokens long."""
    following = torch.tensor(tokens[length + 1 : length + scored + 1])
    whole = tokens[: length + scored]
    freshly = [cache.run(whole, 0, new, 1, scored) for new in news]
    cache.run(tokens[:length], 0, old, 0, 1)
    results: list[dict[str, float]] = []
    for new, fresh in zip(news, freshly, strict=True):
        cache.move(length, old, new)
        ways = {
            "fresh": fresh,
            "re-rotated": cache.run(whole, length, new, 1, scored),
            **{f"last {count} again": cache.run(whole, length - count, new, 1, scored) for count in refreshed},
            "stale": cache.run(whole, length, new, 0, scored),
        }
        results.append({})
        for way, scores in ways.items():
            results[-1][f"{way} nll"] = float(-scores.gather(1, following[:, None]).mean())
            results[-1][f"{way} kl"] = float((fresh.exp() * (fresh - scores)).sum(dim=-1).mean())
    return results


def plan(geometry: RopeGeometry, factor: float) -> PositionPlan:
    """The rung of the default policy."""
    scheme = "yarn" if factor > 1 else "default"
    return make_plan(geometry, scheme, factor, int(factor * geometry.native_length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    loaded = load_model(fetch_default(default_cache_dir()), dtype=torch.bfloat16, device=torch.device("cpu"))
    geometry = read_geometry(loaded.config)
    model = PatchedModel(loaded.model, geometry)
    longest = max(length for _, length in STEPS) + SCORED + 1
    cache = Cache(model, longest)
    done = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    for number, tokens in zip(range(arguments.passages), passages(loaded.tokenizer, longest), strict=False):
        for (old, length), shares in STEPS.items():
            steps = {new: done.setdefault(f"{old:g} to {new:g} at {length}", []) for new in shares}
            news = [new for new, share in shares.items() if len(steps[new]) <= number < share * arguments.passages]
            if not news:
                continue
            before, *after = (plan(geometry, factor) for factor in (old, *news))
            for new, result in zip(news, measure(cache, tokens, before, after, length), strict=True):
                steps[new].append(result)
                print(number, old, new, {name: round(value, 4) for name, value in result.items()}, flush=True)
            arguments.out.write_text(json.dumps(done, indent=1) + "\n")
    print(table(done))


def table(done: dict[str, list[dict[str, float]]]) -> str:
    """Means over passages, as Markdown."""
    ways = ["re-rotated", *(f"last {count} again" for count in REFRESHED), "stale"]
    lines = [
        f"| step | passages | NLL fresh | NLL re-rotated | {' | '.join(f'KL {way}' for way in ways)} |",
        "|---|" + "---|" * (len(ways) + 3),
    ]
    for step, results in done.items():
        means = [mean(results, f"{way} nll", 3) for way in ("fresh", "re-rotated")]
        means += [mean(results, f"{way} kl", 4) for way in ways]
        lines.append(f"| {step} | {len(results)} | {' | '.join(means)} |")
    return "\n".join(lines)


def mean(results: list[dict[str, float]], name: str, digits: int) -> str:
    """Of the passages for which it was measured; empty where it was for none."""
    values = [result[name] for result in results if name in result]
    return f"{statistics.mean(values):.{digits}f}" if values else ""


if __name__ == "__main__":
    main()
