"""From logits to tokens. `prepare` turns sequences into tensors, `sample` turns tensors into token ids.

Bias and penalties (`service.engine.penalties`) and grammars (`service.engine.grammar`) have changed the logits before.
Filters come in transformers' order: temperature, top_k, top_p, min_p. Each request draws from a random stream of its
own, one number a token, so that its choices do not depend on what else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from service import core

LEAST_TEMPERATURE = 1e-5  # as good as greedy; by much less, logits become infinite
CANDIDATES = 1024  # likeliest tokens that mostly hold all of top_p; finding them is far cheaper than sorting all


@dataclass(frozen=True)
class SamplingTensors:
    """The sampled rows of one step; greedy rows are not among them.

    Attributes:
        rows: int64 [S], which rows of the logits are sampled.
        temperature: float32 [S, 1], above 0.
        top_k: int64 [S, 1], 1 to the vocabulary's size.
        top_p: float32 [S, 1].
        min_p: float32 [S, 1].
        draws: float64 [S, 1], uniform in [0, 1).
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    draws: torch.Tensor


def prepare(sequences: Sequence[core.Sequence], vocabulary: int, device: torch.device) -> SamplingTensors | None:
    """Collect the sampling parameters of the rows that are sampled and draw a random number for each.

    Returns:
        None when every row is greedy.
    """
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    if not rows:
        return None
    sampled = [sequences[row] for row in rows]

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    return SamplingTensors(
        rows=torch.tensor(rows, device=device),
        temperature=column([max(s.sampling.temperature, LEAST_TEMPERATURE) for s in sampled]),
        top_k=column([min(s.sampling.top_k or vocabulary, vocabulary) for s in sampled], torch.int64),
        top_p=column([s.sampling.top_p for s in sampled]),
        min_p=column([s.sampling.min_p for s in sampled]),
        draws=column([s.random.random() for s in sampled], torch.float64),
    )


@torch.inference_mode()
def forbid_early_ends(logits: torch.Tensor, sequences: Sequence[core.Sequence]) -> None:
    """Rule out, in place, the end tokens of each sequence that has fewer than min_tokens tokens; where there is a
    grammar, it decides."""
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if len(sequence.output) < sampling.min_tokens and sampling.end_token_ids and sampling.grammar is None:
            logits[row, list(sampling.end_token_ids)] = -torch.inf


@torch.inference_mode()
def sample(logits: torch.Tensor, tensors: SamplingTensors | None) -> list[int]:
    """Choose one token for each row.

    Args:
        logits: float32 [R, vocabulary].
        tensors: the sampled rows; the others take the likeliest token.
    """
    chosen = logits.argmax(dim=-1)
    if tensors is not None:
        chosen[tensors.rows] = _draw(_filter(logits[tensors.rows] / tensors.temperature, tensors), tensors.draws)
    return chosen.tolist()


def _filter(logits: torch.Tensor, tensors: SamplingTensors) -> torch.Tensor:
    """Probabilities [S, vocabulary] after top_k, top_p and min_p, not renormalised."""
    if int(tensors.top_k.min()) < logits.shape[-1]:
        kth = logits.topk(int(tensors.top_k.max())).values.gather(-1, tensors.top_k - 1)
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    probabilities = _keep_top_p(probabilities, tensors.top_p)
    least = tensors.min_p * probabilities.amax(dim=-1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0.0)


def _keep_top_p(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero what lies beyond the likeliest tokens that together reach top_p; rows with top_p 1 are left as they are."""
    [rows] = torch.nonzero(top_p[:, 0] < 1, as_tuple=True)
    if len(rows) == 0:
        return probabilities
    chosen, least_mass = probabilities[rows], top_p[rows]
    ordered, order = chosen.topk(min(CANDIDATES, chosen.shape[-1]))
    if bool((ordered.sum(dim=-1, keepdim=True) < least_mass).any()):
        ordered, order = chosen.sort(dim=-1, descending=True)
    kept = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= least_mass, 0.0)
    kept[:, 0] = ordered[:, 0]
    return probabilities.index_copy(0, rows, torch.zeros_like(chosen).scatter_(-1, order, kept))


def _draw(probabilities: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative probability first exceeds draw × total, int64 [S]."""
    cumulative = probabilities.to(torch.float64).cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=probabilities.shape[-1] - 1)  # a row of NaN gets a token of the vocabulary all the same
