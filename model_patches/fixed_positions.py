"""What has to change in models that rotate nothing, so that one forward pass serves many sequences.

Knows the modules of transformers that compute positions from what one padded batch would have. Does not know attention.
"""

import math
from typing import Any

import torch
from torch import nn

from model_patches.encoding import FixedEncoding


def patch_positions(model: Any, encoding: FixedEncoding) -> None:
    """Make a model take each token's position as it is given, of whichever sequence, and build nothing for the whole
    context. GPT-2 and OPT do.

    Args:
        model: of transformers; changed in place.
        encoding: of the model.
    """
    base = model.base_model
    if model.config.model_type == "gpt2":  # it takes prompts that begin with a padding token for padded
        base.warn_if_padding_and_no_attention_mask = lambda *_args: None
    if encoding.kind == "sinusoidal":
        base.embed_positions = SinusoidalPositions(base.embed_positions)
    if model.config.model_type == "mpt":
        base.build_mpt_alibi_tensor = lambda *_args, **_others: None  # slopes are applied in attention


class SinusoidalPositions(nn.Module):
    """Takes the place of XGLM's table, which is as long as one batch needs it: the same numbers, for any positions."""

    frequencies: torch.Tensor

    def __init__(self, table: Any) -> None:
        """
        Args:
            table: the module that it takes the place of.
        """
        super().__init__()
        self._offset: int = table.offset
        self._dim: int = table.embedding_dim
        self._padding: int | None = table.padding_idx
        self._dtype: torch.dtype = table.weights.dtype
        half = self._dim // 2
        # In float32 as the table is, so that every number is that which the model was trained with.
        steps = torch.arange(half, dtype=torch.int64).float() * -(math.log(10000) / (half - 1))
        self.register_buffer("frequencies", torch.exp(steps).to(table.weights.device), persistent=False)

    def forward(self, position_ids: torch.Tensor, cache_length: int = 0) -> torch.Tensor:
        """sin(p·θ_i) for all i, then cos(p·θ_i), θ_i = 10000^(−i / (d/2 − 1)), as tensor2tensor lays them out.

        Args:
            position_ids: int64 [1, T], from 0; p is two more.
            cache_length: without effect.

        Returns:
            [1, T, d] in the model's dtype.
        """
        del cache_length
        places = position_ids + self._offset
        angles = places.float()[..., None] * self.frequencies
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1)
        waves = nn.functional.pad(waves, (0, self._dim % 2))
        if self._padding is not None:
            waves = waves.masked_fill(places[..., None] == self._padding, 0.0)
        return waves.to(self._dtype)
