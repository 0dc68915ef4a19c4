"""From logits to tokens. `prepare` turns sequences into tensors, `sample` turns tensors into token ids.

Bias and penalties (`service.engine.penalties`) and grammars (`service.engine.grammar`) have changed the logits before.
Filters come in transformers' order: temperature, top_k, top_p, min_p. Each request draws from a random stream of its
own, one number a token, so that its choices do not depend on what else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model_patches.kernels import ops
from service import core
from service.engine.batch import on_device

LEAST_TEMPERATURE = 1e-5  # as good as greedy; by much less, logits become infinite


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
        cut: int64 [C], which of these S rows top_k or top_p may cut: known without asking a device.
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    draws: torch.Tensor
    cut: torch.Tensor


_NONE_SAMPLED = SamplingTensors(
    rows=torch.empty(0, dtype=torch.int64),
    temperature=torch.empty(0),
    top_k=torch.empty(0, dtype=torch.int64),
    top_p=torch.empty(0),
    min_p=torch.empty(0),
    draws=torch.empty(0, dtype=torch.float64),
    cut=torch.empty(0, dtype=torch.int64),
)


def prepare(sequences: Sequence[core.Sequence], vocabulary: int, device: torch.device) -> SamplingTensors | None:
    """Collect the sampling parameters of the rows that are sampled and look up a random number for each.

    Args:
        sequences: of the rows; one that comes several times has a row for its next token, one for the token after it
            and so on.
        vocabulary: how many logits a row has.
        device: where they are.

    Returns:
        None when every row is greedy.
    """
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    if not rows:
        return None
    sampled = [sequences[row] for row in rows]
    numbers: list[tuple[float, ...]] = []
    for place, sequence in enumerate(sampled):
        earlier = sampled[:place].count(sequence) if sequence.draft else 0
        of = sequence.sampling
        top_k = min(of.top_k or vocabulary, vocabulary)
        numbers.append((max(of.temperature, LEAST_TEMPERATURE), top_k, of.top_p, of.min_p, sequence.next_draw(earlier)))
    temperature, top_k, top_p, min_p, draws = np.array(numbers).T[..., None]

    def tensor(column: NDArray[Any], dtype: type[np.number]) -> torch.Tensor:
        return on_device(device, column.astype(dtype))

    return SamplingTensors(
        rows=tensor(np.array(rows), np.int64),
        temperature=tensor(temperature, np.float32),
        top_k=tensor(top_k, np.int64),
        top_p=tensor(top_p, np.float32),
        min_p=tensor(min_p, np.float32),
        draws=tensor(draws, np.float64),
        cut=tensor(np.flatnonzero((top_k < vocabulary) | (top_p < 1)), np.int64),
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
    if logits.device.type == "cpu" and ops.are_loaded():
        return _choose_by_operator(logits, tensors)
    chosen = _likeliest(logits)
    if tensors is not None:
        scaled = logits[tensors.rows] / tensors.temperature
        chosen[tensors.rows] = _draw(_filter(scaled, tensors), tensors.draws)
    return chosen.tolist()


def _choose_by_operator(logits: torch.Tensor, tensors: SamplingTensors | None) -> list[int]:
    of = tensors or _NONE_SAMPLED
    chosen = ops.choose(logits.contiguous(), of.rows, of.temperature, of.top_k, of.top_p, of.min_p, of.draws)
    return chosen.tolist()


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row, int64 [R]."""
    if logits.device.type == "cpu":  # where torch's own takes ten times as long
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _falling(logits: torch.Tensor) -> torch.Tensor:
    """Each row's values from the largest to the smallest."""
    if logits.device.type == "cpu":  # where torch's own takes twenty times as long
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))
    return logits.sort(dim=-1, descending=True).values


def _filter(logits: torch.Tensor, tensors: SamplingTensors) -> torch.Tensor:
    """Probabilities [S, vocabulary] after top_k, top_p and min_p, not renormalised."""
    rows = tensors.cut
    if len(rows) > 0:
        kept = _keep_likeliest(logits[rows], tensors.top_k[rows], tensors.top_p[rows])
        logits = logits.index_copy(0, rows, kept)
    probabilities = logits.softmax(dim=-1)
    least = tensors.min_p * probabilities.amax(dim=-1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0.0)


def _keep_likeliest(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Rule out what lies beyond the top_k likeliest tokens, or beyond the likeliest of these that together reach top_p.

    All that equal the last of the top_k stay; of those that equal the last of top_p, so many as it takes.
    """
    ordered = _falling(logits)
    kth = ordered.gather(-1, top_k - 1)
    mass = ordered.masked_fill(ordered < kth, -torch.inf).softmax(dim=-1)
    is_before = (mass.cumsum(dim=-1) - mass < top_p) | (top_p >= 1)
    is_before[:, 0].fill_(True)
    count = is_before.sum(dim=-1, keepdim=True)
    least = ordered.gather(-1, count - 1).maximum(kth)
    equal = logits == least
    room = count - (ordered > least).sum(dim=-1, keepdim=True)
    equal &= equal.cumsum(dim=-1) <= room
    return logits.masked_fill((logits <= least) & ~equal, -torch.inf)


def _draw(probabilities: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative probability first exceeds draw × total, int64 [S]."""
    cumulative = probabilities.to(torch.float64).cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=probabilities.shape[-1] - 1)  # a row of NaN gets a token of the vocabulary all the same
