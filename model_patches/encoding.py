"""Positions of models that rotate nothing: what they are, and how far they reach.

Knows kinds, lengths and ALiBi's slopes. Does not know where they were read, or which modules compute them.
"""

import math
from dataclasses import dataclass
from typing import Literal

from model_patches.geometry import RopeGeometry
from model_patches.plan import PositionPlan

Kind = Literal["learned", "sinusoidal", "alibi"]

WHAT_THEY_ARE: dict[Kind, str] = {
    "learned": "an embedding was learned for each, and beyond the last there is none",
    "sinusoidal": "they are sines and cosines added to the embeddings, by a formula without an end",
    "alibi": "attention is lowered in proportion to distance (ALiBi), by a formula without an end",
}
"""Of positions, in words."""


@dataclass(frozen=True)
class FixedEncoding:
    """How a model knows positions that no scheme can scale.

    Attributes:
        kind: learned: a table of embeddings (GPT-2); sinusoidal: a formula for embeddings ("Attention Is All You Need",
            1706.03762, section 3.5); alibi: biases of attention (2108.12409).
        native_length: the context the model was trained to use, in tokens.
        slopes: of alibi, one for each head: what is taken off a logit for each token between key and query, after the
            softmax scale; empty for the others.
    """

    kind: Kind
    native_length: int
    slopes: tuple[float, ...] = ()

    @property
    def has_end(self) -> bool:
        """Whether there are no positions beyond the native length."""
        return self.kind == "learned"

    def plan(self, max_length: int) -> PositionPlan:
        """The one plan that there is: nothing is rotated, so it has no frequencies.

        Args:
            max_length: the longest sequence, in tokens, that it covers.
        """
        return PositionPlan(self.kind, 1.0, max_length, inv_freq=(), attention_factor=1.0)


Positions = RopeGeometry | FixedEncoding
"""How a model knows positions."""


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slopes as BLOOM and Falcon have them (2108.12409, section 3, and the authors' code).

    For n heads, n a power of two, the geometric series from 2^(−8/n) with that ratio. For other counts, those of the
    next lower power of two, then every other one, from the first, of the next higher.

    Returns:
        `heads` numbers, float64.
    """
    lower = 2 ** math.floor(math.log2(heads))
    between = [2.0 ** (-8 * (number + 1) / (2 * lower)) for number in range(0, 2 * lower, 2)]
    return (*(2.0 ** (-8 * (number + 1) / lower) for number in range(lower)), *between)[:heads]


def mpt_slopes(heads: int, bias_max: float) -> tuple[float, ...]:
    """ALiBi's slopes as MPT has them (llm-foundry's `gen_slopes`): for n heads the series 2^(−b·i/n), i from 1; for
    counts that are no power of two, of the next higher one every other number from the second on, then the rest.

    Args:
        heads: how many.
        bias_max: b, `alibi_bias_max`; 8 in the paper.

    Returns:
        `heads` numbers, float64.
    """
    higher = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-bias_max * number / higher) for number in range(1, higher + 1)]
    if higher != heads:
        slopes = [*slopes[1::2], *slopes[::2]]
    return tuple(slopes[:heads])
