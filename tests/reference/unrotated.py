"""A second opinion on growth: models whose cache holds keys as they are before any rotation.

Each step rotates its queries and all keys of the past under the plan of the moment, in float64. Nothing is ever
re-rotated, so there is nothing to get wrong in it; hidden states of earlier tokens stay as they were computed. All but
rotation and attention is transformers' own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from model_patches.geometry import Layout
from model_patches.own_attention import OwnAttention, is_own
from model_patches.plan import PositionPlan
from service.core import Segment
from tests.reference.harness import float64_rotary


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
    """One sequence on a model of transformers, which is left as it was after every call.

    The rotary module gives an angle of 0 for all layers but those with rotary parameters of their own, so that
    attention is handed queries and keys that are not rotated.
    """

    def __init__(self, model: Any, layout: Layout = "half") -> None:
        self.model = model
        self.layout = layout
        self.keys: list[torch.Tensor] = [torch.empty(0)] * model.config.num_hidden_layers  # [tokens, kv_heads, dim]
        self.values: list[torch.Tensor] = [torch.empty(0)] * model.config.num_hidden_layers
        self.length = 0

    def forget_after(self, length: int) -> None:
        """Keep so many tokens only."""
        self.keys = [keys[:length] for keys in self.keys]
        self.values = [values[:length] for values in self.values]
        self.length = min(self.length, length)

    @torch.inference_mode()
    def forward(self, tokens: list[int], plan: PositionPlan) -> torch.Tensor:
        """Compute tokens under a plan; logits after each of them, [tokens, vocabulary]."""
        positions = torch.arange(self.length, self.length + len(tokens))
        attend = partial(self._attend, positions=positions, plan=plan)
        AttentionInterface.register("unrotated_reference", attend)
        rotary = self.model.base_model.rotary_emb
        unscaled = replace(plan, inv_freq=(0.0,) * len(plan.inv_freq), attention_factor=1.0)
        self.model.base_model.rotary_emb = float64_rotary(self.model, unscaled, rotary)
        try:
            with attending_by(self.model, "unrotated_reference"):
                output = self.model(torch.tensor([tokens]), position_ids=positions[None], use_cache=False)
        finally:
            self.model.base_model.rotary_emb = rotary
        self.length += len(tokens)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: None,
        *,
        positions: torch.Tensor,
        plan: PositionPlan,
        scaling: float,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of one layer, as transformers' modules call it; windows are read from the config."""
        number = module.layer_idx
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        if self.length:
            key = torch.cat([self.keys[number], key])
            value = torch.cat([self.values[number], value])
        self.keys[number], self.values[number] = key, value
        places = torch.arange(len(key))
        if is_planned(self.model.config, number):
            query, key = self._rotated(query, positions, plan), self._rotated(key, places, plan)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = positions[:, None] - places
        window = window_of_layer(self.model.config, number)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if s_aux is not None:
            scores = torch.cat([scores, s_aux[:, None, None].expand(-1, len(query), 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(key)]
        return torch.einsum("hqk,khd->qhd", weights, value)[None], None

    def _rotated(self, states: torch.Tensor, positions: torch.Tensor, plan: PositionPlan) -> torch.Tensor:
        """Latent attention (DeepSeek) rotates the last dimensions of a head, all others the first."""
        offset = getattr(self.model.config, "qk_nope_head_dim", 0)
        rest, part = states[..., :offset], states[..., offset:]
        return torch.cat([rest, rotate(part, positions, plan, self.layout)], dim=-1)


@contextmanager
def attending_by(model: Any, implementation: str) -> Iterator[None]:
    """A model's attention in the hands of a registered function, while the block runs."""
    before = model.config._attn_implementation
    if is_own(model):
        OwnAttention(model, implementation, None)
    else:
        model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        for module in model.modules():
            vars(module).pop("forward", None)
        model.config._attn_implementation_internal = before


def is_planned(config: Any, layer: int) -> bool:
    """Whether a layer is rotated, and not by parameters of its own."""
    if not (getattr(config, "no_rope_layers", None) or {layer: True})[layer]:
        return False
    return "sliding_attention" not in config.rope_parameters or config.layer_types[layer] != "sliding_attention"


def window_of_layer(config: Any, layer: int) -> int | None:
    """How many of the latest tokens a layer sees; None for all."""
    types = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    return window if types is None or types[layer] == "sliding_attention" else None


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
