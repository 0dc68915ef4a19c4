"""What length costs: a decoded token beside so many cached ones, and the prefill of a prompt of so many tokens.

    python -m benchmarks.by_length [--lengths 1024 2048 4096 8192 16384 32768] [--repetitions 5]

Writes by_length.json, by_length.md and, where matplotlib is installed, by_length.png. A decode step reads all weights
once and the keys and values of its sequence, a prefill multiplies each token with all weights and with the keys and
values before it: the tables say how much of what the machine can read and multiply that is. Run it on an idle machine.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_step import Runs, Step, interleaved
from benchmarks.machine import cpu_name, limits, told
from service.evaluation.plots import can_plot

CHUNK = 512


def prefill(runs: Runs, length: int) -> None:
    """A prompt in chunks, as a server computes it that has nothing else to do."""
    for past in range(0, length, CHUNK):
        runs.forward(Step("chunk", 1, min(CHUNK, length - past), past))


def sizes(runs: Runs) -> dict[str, int]:
    """What a step has to read and to compute.

    Returns:
        Bytes of the weights that each token is multiplied with; bytes of one cached token; operations of one token
        with the weights, and with one token before it.
    """
    config, dim = runs.model.model.config, runs.model.key_dim
    attended, grouped = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer = config.hidden_size * (2 * attended + 2 * grouped + 3 * config.intermediate_size)
    weights = config.num_hidden_layers * layer
    head = config.vocab_size * config.hidden_size
    return {
        "weight_bytes": 2 * (weights + head),
        "token_bytes": 2 * 2 * grouped * config.num_hidden_layers,
        "token_operations": 2 * weights,
        "pair_operations": 4 * attended * config.num_hidden_layers,
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and seconds by length, and their share of the machine's limits."""
    longest = max(arguments.lengths)
    runs = Runs.of_embedded(longest + 16, fuse=True)
    machine, needed = limits(arguments.repetitions), sizes(runs)
    steps = {length: Step(f"{length} cached", 1, 1, length) for length in arguments.lengths}
    decoding = interleaved(
        {step.name: lambda step=step: runs.forward(step) for step in steps.values()}, 4 * arguments.repetitions
    )
    rows = []
    for length, step in steps.items():
        decode_ms = decoding[step.name]["median"]
        prefilling = interleaved({"prefill": lambda length=length: prefill(runs, length)}, arguments.repetitions)
        prefill_s = prefilling["prefill"]["median"] / 1000
        read = needed["weight_bytes"] + length * needed["token_bytes"]
        computed = length * needed["token_operations"] + length**2 // 2 * needed["pair_operations"]
        rows.append(
            {
                "length": length,
                "decode_ms": decode_ms,
                "decode_share": read / machine["read_gb_s"] / 1e6 / decode_ms,
                "prefill_s": prefill_s,
                "prefill_share": computed / machine["bf16_gf_s"] / 1e9 / prefill_s,
            }
        )
        print(rows[-1])
    return {"machine": machine, "sizes": needed, "rows": rows}


def report(found: dict[str, Any]) -> str:
    """As a Markdown table."""
    machine = found["machine"]
    lines = [
        f"{torch.get_num_threads()} cores ({cpu_name()}), torch {torch.__version__}, bfloat16, SmolLM2-135M-Instruct, "
        f"one sequence. The machine {told(machine)}.",
        "",
        "| tokens | a decoded token beside them, ms | of the reading rate | their prefill, s | tokens a second "
        "| of the product rate |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['length']:,} | {row['decode_ms']:.1f} | {row['decode_share']:.0%} | {row['prefill_s']:.2f} "
        f"| {row['length'] / row['prefill_s']:.0f} | {row['prefill_share']:.0%} |"
        for row in found["rows"]
    ]
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], file: Path) -> None:
    """Both curves, beside the lines on which they would lie at the machine's limits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths = [row["length"] for row in found["rows"]]
    for axes, title, unit, share in (
        (left, "A decoded token beside so many cached ones", "decode_ms", "decode_share"),
        (right, "The prefill of a prompt", "prefill_s", "prefill_share"),
    ):
        axes.plot(lengths, [row[unit] for row in found["rows"]], marker="o", label="measured")
        axes.plot(
            lengths, [row[unit] * row[share] for row in found["rows"]], "--", color="grey", label="machine's limit"
        )
        axes.set(title=title, xlabel="tokens", ylabel="ms" if unit == "decode_ms" else "s", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    found = measure(arguments)
    (arguments.out / "by_length.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.out / "by_length.md").write_text(report(found))
    if can_plot():
        draw(found, arguments.out / "by_length.png")
    print(report(found))


if __name__ == "__main__":
    main()
