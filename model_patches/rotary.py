"""Rotation of every token under its own plan.

Knows plans and one transformers model's rotary module. Does not know sequences: a token comes with its position and
the row of its plan, and nothing is remembered between two calls.
"""

from typing import Literal

import torch
from torch import nn

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import LocalRope, RopeGeometry
from model_patches.plan import PositionPlan
from model_patches.schemes.frequencies import geometric_series

FIRST_ROWS = 256  # a server has a dozen plans as a rule

Columns = Literal["pairs", "halves", "neighbours"]
"""How cos and sin of d/2 pairs lie in a rotary module's output: once each (gpt-oss); twice, pair i in columns i and
i + d/2 (most), or in 2i and 2i + 1 (Cohere)."""


class FrequencyTable(nn.Module):
    """The inverse frequencies and attention factors of all plans in use, one row each.

    Rows are only ever added, never changed, so a row number stays good for the life of the table. Their memory stays
    where it is until the table is full; then both buffers are replaced. Angles are computed from them for each step
    rather than kept: a table of cos and sin would take 8 bytes for every pair and position of every plan (268 MB for
    one rung at 512K and 64 pairs), and would have an end that a sequence can cross.
    """

    inv_freq: torch.Tensor
    attention_factor: torch.Tensor

    def __init__(self, pairs: int, device: torch.device) -> None:
        """Make an empty table.

        Args:
            pairs: rotated pairs in each head, rotary_dim / 2.
            device: where the model runs.
        """
        super().__init__()
        inv_freq = torch.zeros(FIRST_ROWS, pairs, dtype=torch.float64, device=device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("attention_factor", inv_freq.new_zeros(FIRST_ROWS), persistent=False)
        self._rows: dict[PositionPlan, int] = {}

    def row(self, plan: PositionPlan) -> int:
        """The row of a plan, added if it is new."""
        row = self._rows.get(plan)
        if row is None:
            row = self._rows[plan] = len(self._rows)
            if row == len(self.inv_freq):
                self.inv_freq = torch.cat([self.inv_freq, torch.zeros_like(self.inv_freq)])
                self.attention_factor = torch.cat([self.attention_factor, torch.zeros_like(self.attention_factor)])
            self.inv_freq[row] = self.inv_freq.new_tensor(plan.inv_freq)
            self.attention_factor[row] = plan.attention_factor
        return row


class PlanRotary(nn.Module):
    """Takes the place of a model's rotary module; the formula is R(θ·p) of RoFormer (2104.09864, 3.2.2)."""

    local_inv_freq: torch.Tensor

    def __init__(
        self, frequencies: FrequencyTable, local: LocalRope | None = None, columns: Columns = "halves"
    ) -> None:
        """
        Args:
            frequencies: of the plans.
            local: of layers with a window that have rotary parameters of their own; plans leave them alone.
            columns: where the model looks for each pair's cos and sin.
        """
        super().__init__()
        self.frequencies = frequencies
        self._local_types = () if local is None else local.layer_types
        local_inv_freq = [] if local is None else geometric_series(local.theta, local.rotary_dim).tolist()
        self.register_buffer("local_inv_freq", frequencies.inv_freq.new_tensor(local_inv_freq), persistent=False)
        self._columns = columns

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute cos and sin of each token, both already multiplied by its plan's attention factor.

        Args:
            x: gives dtype only.
            position_ids: int64 [2, 1, T]: positions, and the plan's row in the frequency table. Both travel in the
                one argument that transformers' models hand on untouched to their rotary module.
            layer_type: for which layers, in models whose layers differ.

        Returns:
            cos and sin in x's dtype, [1, T, rotary_dim], or [1, T, rotary_dim / 2] with the columns "pairs". Angles are
            float64, rounded to float32 once and then to x's dtype.
        """
        positions, rows = position_ids
        if layer_type in self._local_types:
            angles = positions.to(torch.float64)[..., None] * self.local_inv_freq
            factor = torch.ones_like(angles[..., :1])
        else:
            angles = positions.to(torch.float64)[..., None] * self.frequencies.inv_freq[rows]
            factor = self.frequencies.attention_factor[rows][..., None]
        cos, sin = ((wave * factor).to(torch.float32).to(x.dtype) for wave in (angles.cos(), angles.sin()))
        return _laid_out(cos, self._columns), _laid_out(sin, self._columns)


def _laid_out(wave: torch.Tensor, columns: Columns) -> torch.Tensor:
    if columns == "pairs":
        return wave
    return torch.cat([wave, wave], dim=-1) if columns == "halves" else wave.repeat_interleave(2, dim=-1)


def replace_rotary(model: nn.Module, frequencies: FrequencyTable, geometry: RopeGeometry) -> None:
    """Replace the rotary module of this one model object.

    Raises:
        UnsupportedModelError: the model has no rotary module, or several.
    """
    rotary = {name: module for name, module in model.named_modules() if _is_rotary(module)}
    if len(rotary) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(rotary)} rotary modules ({', '.join(rotary) or 'none'}); "
            "exactly 1 is supported"
        )
    [(name, original)] = rotary.items()
    columns = _columns(original, geometry, frequencies.inv_freq.device)
    model.set_submodule(name, PlanRotary(frequencies, geometry.local, columns))


def _is_rotary(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _columns(rotary: nn.Module, geometry: RopeGeometry, device: torch.device) -> Columns:
    """How a model's own rotary module lays out its output, told from that of position 1, where no two pairs are alike.

    Raises:
        UnsupportedModelError: it rotates another number of dimensions than the config says.
    """
    layer_type = () if geometry.local is None else ("full_attention",)
    cos, _sin = rotary(torch.zeros(1, device=device), torch.ones(1, 1, dtype=torch.int64, device=device), *layer_type)
    given = cos.shape[-1]
    if given == geometry.rotary_dim // 2:
        return "pairs"
    if given != geometry.rotary_dim:
        raise UnsupportedModelError(
            f"{type(rotary).__name__} gives {given} columns, the config says rotary dimension {geometry.rotary_dim}"
        )
    return "neighbours" if torch.equal(cos[..., 0::2], cos[..., 1::2]) else "halves"
