"""How far four ways of knowing positions reach beyond training, on tiny models that differ in nothing else.

For each encoding a byte-level model of two layers is trained on windows of 64 tokens of the language reference that
comes with Python, with the same seed and steps. Then the last 32 bytes of passages that it has not seen are predicted
from 64 tokens, and from up to four times as many, by the patched model over its paged cache, as a server runs it: the
same bytes each time, so that whoever can use more context does better, and whoever cannot bear it worse.

    python -m benchmarks.encodings [--steps 300] [--passages 40] [--out benchmarks/encodings.md]

Some two minutes on an idle core.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.growth import Cache
from model_patches.encoding import FixedEncoding
from model_patches.encoding_config import read_positions
from model_patches.kernels import build
from model_patches.patch import PatchedModel
from model_patches.plan import PositionPlan
from service.errors import ContextLengthError
from service.evaluation.schemes import SchemeAsked, choose
from service.evaluation.texts import builtin_text
from service.scaling.fixed import AnyPolicy, FixedPolicy
from service.scaling.policy import Policy

TRAINED = 64
LENGTHS = (64, 96, 128, 192, 256)
SCORED = 32
STEPS, WINDOWS_A_STEP, RATE = 300, 32, 5e-3
PASSAGES = 40
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": TRAINED, "n_embd": 96, "n_layer": 2, "n_head": 4}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "xglm": {"max_position_embeddings": TRAINED, "d_model": 96, "ffn_dim": 384, "num_layers": 2, "attention_heads": 4}
    | dict.fromkeys(("dropout", "attention_dropout"), 0.0),
    "llama": {"max_position_embeddings": TRAINED, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "tie_word_embeddings": True},
    "bloom": {"seq_length": TRAINED, "hidden_size": 96, "n_layer": 2, "n_head": 4},
}
MODELS = {"learned": "gpt2", "sinusoidal": "xglm", "RoPE": "llama", "ALiBi": "bloom"}
BYTES: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SCHEMES = {"default": "unscaled", "linear": "position interpolation", "ntk": "NTK", "yarn": "YaRN"}
"""Of RoPE, each with the factor that just covers the length."""


@dataclass(frozen=True)
class Trained:
    """A model, what chooses its plans, and room for one passage."""

    policy: AnyPolicy
    cache: Cache

    def loss(self, plan: PositionPlan, passages: Sequence[list[int]], length: int) -> float:
        """Nats a token of the last `SCORED` tokens of passages, the last from `length` tokens."""
        losses = []
        for passage in passages:
            tokens, following = passage[-length - 1 : -1], torch.tensor(passage[-SCORED:])
            scores = self.cache.run(tokens, 0, plan, 0, SCORED)
            losses.append(-scores.gather(1, following[:, None]).mean())
        return float(torch.stack(losses).mean())


def texts(passages: int) -> tuple[torch.Tensor, list[list[int]]]:
    """What is trained on, int64 [tokens], and passages from the tenth that is not."""
    known = list(builtin_text().content.encode("ascii", "ignore"))
    split, length = len(known) * 9 // 10, LENGTHS[-1] + 1
    starts = range(split, len(known) - length, length)
    return torch.tensor(known[:split]), [known[start : start + length] for start in starts][:passages]


def train(name: str, tokens: torch.Tensor, steps: int) -> Trained:
    """Train a model from the same seed as all others, and patch it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(MODELS[name], **BYTES, **SHAPES[MODELS[name]])
    model: Any = AutoModelForCausalLM.from_config(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.1)
    window = torch.arange(TRAINED + 1)
    for _ in range(steps):
        batch = tokens[torch.randint(len(tokens) - TRAINED, (WINDOWS_A_STEP, 1)) + window]
        logits = model(batch[:, :-1], use_cache=False).logits
        optimiser.zero_grad()
        cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    positions = read_positions(config.to_dict())
    policy: AnyPolicy = FixedPolicy(positions) if isinstance(positions, FixedEncoding) else Policy(positions)
    return Trained(policy, Cache(PatchedModel(model.requires_grad_(False).eval(), positions), LENGTHS[-1] + 1))


def rows(name: str, trained: Trained, passages: Sequence[list[int]]) -> Iterator[tuple[str, list[float | None]]]:
    """A name, and losses by length; None where the model has no such positions."""
    fixed = isinstance(trained.policy, FixedPolicy)
    for scheme, said in {trained.policy.schemes[0]: ""}.items() if fixed else SCHEMES.items():
        choices = [choose(SchemeAsked(scheme), trained.policy, length) for length in LENGTHS]
        losses = [
            None if choice is None else trained.loss(choice.plan, passages, length)
            for choice, length in zip(choices, LENGTHS, strict=True)
        ]
        yield f"{name}, {said}" if said else name, losses


def refusal(policy: AnyPolicy) -> str:
    """What a request of one token too many is told; empty where it is served."""
    try:
        policy.choose(TRAINED, 1)
    except ContextLengthError as error:
        return error.message
    return ""


def report(table: dict[str, list[float | None]], refused: str, steps: int, passages: int) -> str:
    """The table, as Markdown."""
    lines = [
        "# How far positions reach beyond training",
        "",
        f"By `python -m benchmarks.encodings`: byte-level models of two layers, 96 wide, trained for {steps} steps on",
        f"windows of {TRAINED} tokens of the Python language reference; nats a byte of the last {SCORED} bytes of "
        f"{passages} passages",
        "from the tenth that was held back, predicted from so many tokens. RoPE's schemes have the factor that just "
        "covers the",
        "length.",
        "",
        f"| positions | {' | '.join(map(str, LENGTHS))} |",
        f"|---{'|---' * len(LENGTHS)}|",
    ]
    for name, losses in table.items():
        cells = " | ".join("refused" if loss is None else f"{loss:.3f}" for loss in losses)
        lines.append(f"| {name} | {cells} |")
    return "\n".join([*lines, "", f"One token more than {TRAINED}, where positions are learned: “{refused}”.", ""])


def main() -> None:
    """Train, measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--passages", type=int, default=PASSAGES)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/encodings.md"))
    given = parser.parse_args()
    build.load()
    tokens, passages = texts(given.passages)
    table: dict[str, list[float | None]] = {}
    refused = ""
    for name in MODELS:
        trained = train(name, tokens, given.steps)
        table |= dict(rows(name, trained, passages))
        refused = refused or refusal(trained.policy)
        print(name, table[next(reversed(table))], flush=True)
    given.out.write_text(report(table, refused, given.steps, len(passages)), encoding="utf-8")
    print(given.out)


if __name__ == "__main__":
    main()
