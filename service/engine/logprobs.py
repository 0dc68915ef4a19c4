"""Log-probabilities of chosen tokens and of the likeliest ones, for the rows that ask; and those of prompts.

They are natural logarithms of the model's own distribution: of the logits as the model gave them, before bias,
penalties, grammar, temperature and filters. So does vLLM by default (`logprobs_mode` is `raw_logprobs`), save that it
applies grammars first. They do not depend on how a token was chosen: a token that a bias forced is as unlikely as the
model finds it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from service import core


@dataclass(frozen=True)
class TokenLogprobs:
    """What is reported with one token, in the fields of `core.TokenEvent`."""

    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Distributions:
    """The model's distributions of the rows that ask.

    Attributes:
        counts: row of the logits → how many of the likeliest tokens it asks for.
        logprobs: float32 [rows asking, vocabulary].
    """

    counts: dict[int, int]
    logprobs: torch.Tensor

    @torch.inference_mode()
    def report(self, chosen: list[int]) -> list[TokenLogprobs]:
        """What goes with each row's token.

        Args:
            chosen: one token for each row of the logits, asking or not.
        """
        reported = [TokenLogprobs()] * len(chosen)
        tokens = torch.tensor([chosen[row] for row in self.counts], device=self.logprobs.device)
        own = self.logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        likeliest = self.logprobs.topk(max(self.counts.values()))
        rows = zip(self.counts.items(), own, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        for (row, count), logprob, ids, values in rows:
            reported[row] = TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        return reported


@torch.inference_mode()
def distributions(logits: torch.Tensor, sequences: Sequence[core.Sequence]) -> Distributions | None:
    """Keep what reports will need; to be called before anything changes the logits.

    Args:
        logits: float32 [R, vocabulary], as the model gave them.
        sequences: the rows.

    Returns:
        None when no row asks.
    """
    vocabulary = logits.shape[-1]
    asked = ((row, sequence.sampling.logprobs) for row, sequence in enumerate(sequences))
    counts = {row: min(count, vocabulary) for row, count in asked if count is not None}
    return Distributions(counts, logits[list(counts)].log_softmax(dim=-1)) if counts else None


@torch.inference_mode()
def tell_prompts(logits: torch.Tensor, step: Mapping[core.Sequence, int]) -> torch.Tensor:
    """Tell what a step says of its sequences' prompts; to be called before the step counts as computed.

    Args:
        logits: float32 [R, vocabulary], after each token that `core.Sequence.logits_wanted` names.
        step: how many tokens of each sequence were computed.

    Returns:
        The rows from which tokens are chosen.
    """
    if all(sequence.sampling.prompt_logprobs is None for sequence in step):
        return logits
    chosen_from: list[int] = []
    row = 0
    for sequence, tokens in step.items():
        wanted, first = sequence.logits_wanted(tokens), row
        row += len(wanted)
        following = max(0, sequence.num_computed + tokens - sequence.num_tokens + 1)  # rows that tokens are chosen from
        chosen_from += range(row - following, row)
        wanted = wanted[: len(wanted) - following]
        if wanted and sequence.sampling.prompt_logprobs is not None:
            start = sequence.num_computed + wanted[0] + 1
            told = sequence.prompt[start : start + len(wanted)]
            _tell(sequence, told, logits[first : first + len(wanted)], sequence.sampling.prompt_logprobs)
    return logits[chosen_from]


def _tell(sequence: core.Sequence, tokens: list[int], logits: torch.Tensor, count: int) -> None:
    counts = dict.fromkeys(range(len(tokens)), min(count, logits.shape[-1]))
    reported = Distributions(counts, logits.log_softmax(dim=-1)).report(tokens)
    told = (core.TokenEvent(token, "", of.logprob, of.top) for token, of in zip(tokens, reported, strict=True))
    sequence.deliver(core.PromptEvent(tuple(told)))
    sequence.num_prompt_told += len(tokens)
