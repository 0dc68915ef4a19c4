"""A second opinion on growth: models whose cache holds keys as they are before any rotation.

Each step rotates its queries and all keys of the past under the plan of the moment, in float64. Nothing is ever
re-rotated, so there is nothing to get wrong in it; hidden states of earlier tokens stay as they were computed. The
modules (projections, norms, MLP) are transformers' own.
"""

from typing import Any

import torch

from model_patches.geometry import Layout
from model_patches.plan import PositionPlan
from service.core import Segment


def rotate(states: torch.Tensor, positions: torch.Tensor, plan: PositionPlan, layout: Layout) -> torch.Tensor:
    """Rotate the first dimensions of each head, as complex numbers.

    Args:
        states: [tokens, heads, head_dim], not rotated.
        positions: [tokens].
        plan: gives angles and the attention factor.
        layout: which dimensions are rotated together.
    """
    pairs = len(plan.inv_freq)
    angles = positions.double()[:, None, None] * torch.tensor(plan.inv_freq, dtype=torch.float64)
    turn = torch.polar(torch.full_like(angles, plan.attention_factor), angles)
    part = states[..., : 2 * pairs].double()
    if layout == "half":
        turned = torch.complex(part[..., :pairs], part[..., pairs:]) * turn
        rotated = torch.cat([turned.real, turned.imag], dim=-1)
    else:
        turned = torch.complex(part[..., 0::2], part[..., 1::2]) * turn
        rotated = torch.stack([turned.real, turned.imag], dim=-1).flatten(-2)
    return torch.cat([rotated.to(states.dtype), states[..., 2 * pairs :]], dim=-1)


class UnrotatedCache:
    """One sequence on a Llama, GLM-4 or Phi-3 model of transformers."""

    def __init__(self, model: Any, layout: Layout = "half") -> None:
        self.model = model
        self.layout = layout
        self.keys: list[torch.Tensor] = [torch.empty(0) for _ in model.model.layers]  # [tokens, kv_heads, head_dim]
        self.values: list[torch.Tensor] = [torch.empty(0) for _ in model.model.layers]
        self.length = 0

    def forget_after(self, length: int) -> None:
        """Keep so many tokens only."""
        self.keys = [keys[:length] for keys in self.keys]
        self.values = [values[:length] for values in self.values]
        self.length = min(self.length, length)

    @torch.inference_mode()
    def forward(self, tokens: list[int], plan: PositionPlan) -> torch.Tensor:
        """Compute tokens under a plan; logits after each of them, [tokens, vocabulary]."""
        self.positions = torch.arange(self.length, self.length + len(tokens))
        hidden = self.model.model.embed_tokens(torch.tensor(tokens))
        for number, layer in enumerate(self.model.model.layers):
            attended = self._attend(number, layer.self_attn, layer.input_layernorm(hidden), plan)
            if hasattr(layer, "post_self_attn_layernorm"):  # GLM-4 norms what comes out, too
                hidden = hidden + layer.post_self_attn_layernorm(attended)
                hidden = hidden + layer.post_mlp_layernorm(layer.mlp(layer.post_attention_layernorm(hidden)))
            else:
                hidden = hidden + attended
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.length += len(tokens)
        logits: torch.Tensor = self.model.lm_head(self.model.model.norm(hidden))
        return logits

    def _attend(self, number: int, attention: Any, hidden: torch.Tensor, plan: PositionPlan) -> torch.Tensor:
        query, key, value = _project(attention, hidden)
        if self.length:
            key = torch.cat([self.keys[number], key])
            value = torch.cat([self.values[number], value])
        self.keys[number], self.values[number] = key, value
        query = rotate(query, self.positions, plan, self.layout)
        key = rotate(key, torch.arange(len(key)), plan, self.layout)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * attention.scaling
        future = torch.arange(len(key))[None, :] > self.positions[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
        result: torch.Tensor = attention.o_proj(mixed)
        return result


def _project(attention: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of tokens, [tokens, heads, head_dim] each."""
    config, dim = attention.config, attention.head_dim
    if hasattr(attention, "qkv_proj"):  # Phi-3 has them in one matrix
        heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        query, key, value = attention.qkv_proj(hidden).split([count * dim for count in heads], dim=-1)
    else:
        query, key, value = attention.q_proj(hidden), attention.k_proj(hidden), attention.v_proj(hidden)
    query, key, value = (states.unflatten(-1, (-1, dim)) for states in (query, key, value))
    return query, key, value


def grown_logits(
    model: Any, layout: Layout, tokens: list[int], start: int, stages: list[tuple[int, list[Segment]]]
) -> torch.Tensor:
    """Logits that follow tokens[start:], one row each, of a sequence that went from plan to plan.

    Args:
        model: not patched.
        layout: which dimensions of its heads are rotated together.
        tokens: prompt and output.
        start: the first token whose logits are wanted.
        stages: each the number of tokens up to which it lasts, with the plan history that holds in it; a segment that
            begins before the end of the stage before it is computed again.
    """
    cache = UnrotatedCache(model, layout)
    rows: dict[int, torch.Tensor] = {}
    for until, history in stages:
        plan = history[-1].plan
        cache.forget_after(history[-1].start)
        begin = cache.length
        for place, row in enumerate(cache.forward(tokens[begin:until], plan), start=begin):
            rows.setdefault(place, row)  # what was computed again had been answered before
    return torch.stack([rows[place] for place in range(start, len(tokens))])
