"""Logit bias and penalties, before temperature: one gather, the formulas, one scatter, for all rows that ask for any.

In the order of transformers and vLLM: bias, then the repetition penalty, then frequency and presence. What a sequence
keeps is sparse and grows with each token, so that a step costs as much as it has had different tokens, whatever the
vocabulary's size.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from service.core import SamplingParams, Sequence

FIRST_CAPACITY = 64
TOKEN, BIAS, SEEN, COUNT = range(4)  # rows of the table


class Adjustments:
    """What one sequence does to its logits. Made before its first token, told of each that follows."""

    def __init__(self, sampling: SamplingParams, prompt: list[int]) -> None:
        self.repetition = sampling.repetition_penalty
        self.frequency = sampling.frequency_penalty
        self.presence = sampling.presence_penalty
        seen = dict.fromkeys(prompt) if self.repetition != 1 else {}
        self._columns = {token: column for column, token in enumerate(seen | dict.fromkeys(sampling.logit_bias))}
        self._table = np.zeros((4, max(FIRST_CAPACITY, 2 * len(self._columns))))
        self._table[TOKEN, : len(self._columns)] = list(self._columns)
        self._table[SEEN, : len(seen)] = 1
        for token, bias in sampling.logit_bias.items():
            self._table[BIAS, self._columns[token]] = bias

    @property
    def table(self) -> NDArray[np.float64]:
        """float64 [4, N], a column for each token that is not left alone: its id, its bias, whether it was in the
        prompt or the output, and how many times it was generated."""
        return self._table[:, : len(self._columns)]

    def count(self, token: int) -> None:
        """One more token was generated."""
        column = self._columns.setdefault(token, len(self._columns))
        if column == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
        self._table[TOKEN, column] = token
        self._table[SEEN, column] = 1
        self._table[COUNT, column] += 1


def adjustments_for(sequence: Sequence) -> Adjustments | None:
    """A new sequence's adjustments, None where it asks for none."""
    sampling = sequence.sampling
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1)
    return Adjustments(sampling, sequence.prompt) if sampling.logit_bias or any(penalties) else None


@torch.inference_mode()
def apply(logits: torch.Tensor, adjusted: Mapping[int, Adjustments]) -> None:
    """Adjust some rows in place.

    Args:
        logits: float32 [R, vocabulary].
        adjusted: the rows that ask for it.
    """
    if not adjusted:
        return
    tables = [adjustments.table for adjustments in adjusted.values()]
    table = torch.from_numpy(np.concatenate(tables, axis=1)).to(logits.device)
    # For each column: its row of the logits, and its sequence's three numbers.
    sizes = [each.shape[1] for each in tables]
    rows = torch.from_numpy(np.repeat(list(adjusted), sizes)).to(logits.device)
    numbers = np.array([(each.repetition, each.frequency, each.presence) for each in adjusted.values()])
    repetition, frequency, presence = torch.from_numpy(np.repeat(numbers, sizes, axis=0)).to(logits.device).unbind(1)

    tokens, count = table[TOKEN].to(torch.int64), table[COUNT]
    values = logits[rows, tokens] + table[BIAS]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(table[SEEN] > 0, repeated, values)
    values -= frequency * count + presence * (count > 0)
    logits[rows, tokens] = values.to(logits.dtype)
