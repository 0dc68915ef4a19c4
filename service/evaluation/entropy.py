"""Attention entropy by length, with and without the attention factor.

YaRN divides the logits of attention by a temperature t with √(1/t) = 0.1 ln s + 1 (2309.00071, section 3.4), so that
attention over more keys does not become flatter than it was trained to be. Here the same queries meet the same keys
twice: as they are, the factor m = √(1/t) in both, and with it taken out, the logits divided by m². On the unrotated
reference path, which is never served.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from service.evaluation.bench import Bench
from service.evaluation.errors import EvaluationError
from service.evaluation.figures import Lines, Shown, Table
from service.evaluation.ledger import Job, Ledger
from service.evaluation.likelihood import choices
from service.evaluation.texts import name_of
from service.scaling.fixed import FixedPolicy
from service.scaling.policy import PlanChoice

QUERIES = 32  # the last tokens of a document, those with the most keys
LAYERS = 4  # evenly spaced
DIGITS = 5


def jobs(bench: Bench) -> list[Job]:
    """A cell for each rotation, length and document: `with` and `without` the factor, each by `layers`, in nats.

    Raises:
        EvaluationError: the model's attention has no such factor.
    """
    if isinstance(bench.policy, FixedPolicy):
        raise EvaluationError(f"--measure entropy: there is no attention factor to take out ({bench.policy.why})")
    return [
        Job(_key(choice, length, document), length, partial(_measure, bench, document[:length], choice))
        for (_, length), choice in choices(bench).items()
        for document in bench.cut(max(bench.lengths))
    ]


def _key(choice: PlanChoice, length: int, document: list[int]) -> dict[str, Any]:
    plan = choice.plan
    named = {"scheme": plan.scheme, "factor": plan.factor, "rotation": plan.fingerprint}
    return {"measure": "entropy", **named, "length": length, "document": name_of(document[:length])}


def _measure(bench: Bench, document: list[int], choice: PlanChoice) -> dict[str, Any]:
    model, plan = bench.reference(), choice.plan
    model.clear()
    sampled = sorted({round(layer) for layer in np.linspace(0, model.layers - 1, min(LAYERS, model.layers))})
    applied: dict[int, float] = {}
    removed: dict[int, float] = {}

    def look(layer: int, logits: torch.Tensor) -> None:
        if layer in sampled:
            applied[layer] = mean_entropy(logits)
            removed[layer] = mean_entropy(logits / plan.attention_factor**2)

    queries = min(QUERIES, len(document) - 1)
    model.forward(document[:-queries], plan, 0)
    model.forward(document[-queries:], plan, 0, look)
    by_layer = {
        name: [round(found[layer], DIGITS) for layer in sampled]
        for name, found in (("with", applied), ("without", removed))
    }
    return {"layers": sampled, **by_layer}


def mean_entropy(logits: torch.Tensor) -> float:
    """−Σ p ln p of each softmax, in nats, averaged over heads and queries.

    Args:
        logits: float32 [heads, queries, keys], −inf where a key is not seen.
    """
    logs = logits.log_softmax(dim=-1)
    return float(-(logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)).sum(dim=-1).mean())


def show(bench: Bench, ledger: Ledger) -> Shown:
    """Mean entropy by scheme and length."""
    documents = bench.cut(max(bench.lengths))
    rows, curves = [], dict[str, list[tuple[float, float]]]()
    found = choices(bench)
    for scheme in bench.schemes:
        for name in ("with", "without"):
            values = {
                length: float(
                    np.mean([ledger[_key(found[scheme, length], length, document)][name] for document in documents])
                )
                for length in bench.lengths
                if (scheme, length) in found
            }
            scales = any(found[scheme, length].plan.attention_factor != 1 for length in values)
            if name == "without" and not scales:
                continue
            label = f"{scheme}, {name} the factor" if scales else str(scheme)
            curves[label] = [(float(length), value) for length, value in values.items()]
            rows.append([label, *(f"{values[n]:.3f}" if n in values else "" for n in bench.lengths)])
    note = f"All heads of {LAYERS} layers at most, the last {QUERIES} tokens of each document. Named by the scheme; "
    note += "schemes with an attention factor have two rows."
    table = Table("Entropy of attention, nats", ["scheme", *map(str, bench.lengths)], rows, note)
    curve = Lines("entropy", "Attention entropy", "keys", "nats", curves, float(bench.policy.native_length))
    return Shown("Attention entropy", [table], [curve])
