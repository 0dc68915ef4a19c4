"""A reference that is never served: a model whose cache holds keys as they are before any rotation.

Each step rotates its queries and all keys of the past under the plan of the moment, so that nothing needs re-rotating
when the plan changes; hidden states of earlier tokens stay as they were computed. All but rotation and attention is
transformers' own code, and attention is written out, so that its weights can be looked at. Knows one sequence at a
time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AttentionInterface

from model_patches.attention import check_request, hidden_keys, window_of
from model_patches.geometry import RopeGeometry
from model_patches.patch import PatchedModel
from model_patches.plan import PositionPlan

ATTENTION = "ropewalk_unrotated"
"""Name under which the attention function is registered with transformers."""
TOKENS_AT_A_TIME = 128  # bounds the attention weights: heads × 128 × keys in float32

Look = Callable[[int, torch.Tensor], None]
"""Called with a layer's number and the logits of its attention, float32 [heads, queries, keys], before the softmax."""


class UnrotatedModel:
    """One sequence on one model."""

    def __init__(self, model: Any, geometry: RopeGeometry) -> None:
        """
        Args:
            model: of transformers, in eval mode; patched in place, so nothing else can use it.
            geometry: of the model.
        """
        self._patched = PatchedModel(model, geometry, fuse=False)
        AttentionInterface.register(ATTENTION, _attention_forward)
        self._patched.attend_by(ATTENTION)
        pairs = geometry.rotary_dim // 2
        self._geometry = geometry
        self._unrotated = self._patched.plan_row(PositionPlan("unrotated", 1.0, 0, (0.0,) * pairs, 1.0))
        self.clear()

    @property
    def layers(self) -> int:
        return self._patched.layers

    def clear(self) -> None:
        """Forget the sequence."""
        self._keys: dict[int, torch.Tensor] = {}  # [kv_heads, tokens, key_dim], not rotated
        self._values: dict[int, torch.Tensor] = {}
        self.length = 0

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], plan: PositionPlan, wanted: int, look: Look | None = None) -> torch.Tensor:
        """Compute the next tokens of the sequence under a plan.

        Args:
            tokens: at least `wanted`.
            plan: of these tokens, and of all cached keys while they are computed.
            wanted: logits after so many of the last tokens.
            look: sees all attention, at most `TOKENS_AT_A_TIME` queries at once.

        Returns:
            float32 [wanted, vocabulary].
        """
        rows = []
        for start in range(0, len(tokens), TOKENS_AT_A_TIME):
            some = torch.tensor(tokens[start : start + TOKENS_AT_A_TIME], device=self._patched.device)
            left = len(tokens) - start - len(some)
            keep = min(len(some), max(0, wanted - left))
            positions = torch.arange(self.length, self.length + len(some), device=some.device)
            at = torch.arange(len(some) - keep, len(some), device=some.device)
            self._look, self._attention_factor = look, plan.attention_factor
            self._set_waves(plan, self.length + len(some), some.device)
            plan_rows = torch.full_like(positions, self._unrotated)
            rows.append(self._patched.run(some, positions, plan_rows, at, unrotated=self))
            self.length += len(some)
        return torch.cat(rows)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of one layer over the whole past.

        Args:
            layer: its number.
            query: [heads, queries, key_dim], not rotated.
            key: [kv_heads, queries, key_dim], likewise.
            value: [kv_heads, queries, value_dim].
            scale: of the softmax.
            window: how many of the latest tokens are seen; None for all.
            sinks: [heads], a logit of each head that takes its share and gives nothing; or none.
            softcap: what logits stay below; or none.

        Returns:
            [queries, heads, value_dim].
        """
        if self.length:
            key = torch.cat([self._keys[layer], key], dim=1)
            value = torch.cat([self._values[layer], value], dim=1)
        self._keys[layer], self._values[layer] = key, value
        if layer not in self._patched.local_layers:
            query, key = self._rotated(query, self.length), self._rotated(key, 0)
        group = len(query) // len(key)
        logits = (query @ key.repeat_interleave(group, dim=0).transpose(1, 2)).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits.masked_fill_(hidden_keys(query.shape[1], key.shape[1], window, query.device), -torch.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, logits.shape[1], 1)], dim=2)
        if self._look is not None:
            self._look(layer, logits)
        weights = logits.softmax(dim=-1)[..., : key.shape[1]].to(value.dtype)
        return (weights @ value.repeat_interleave(group, dim=0)).transpose(0, 1)

    def _set_waves(self, plan: PositionPlan, length: int, device: torch.device) -> None:
        """cos and sin of every position so far, float32 [length, pairs], times the attention factor."""
        places = torch.arange(length, dtype=torch.float64, device=device)
        angles = torch.outer(places, torch.tensor(plan.inv_freq, dtype=torch.float64, device=device))
        self._cos = (angles.cos() * plan.attention_factor).float()
        self._sin = (angles.sin() * plan.attention_factor).float()

    def _rotated(self, states: torch.Tensor, first: int) -> torch.Tensor:
        """States [heads, tokens, dim] of the positions from `first` on, their rotary part turned."""
        offset, width = self._patched.rotary_offset, self._geometry.rotary_dim
        places = slice(first, first + states.shape[1])
        cos, sin = self._cos[places], self._sin[places]
        part = states[..., offset : offset + width].float()
        halves = self._geometry.layout == "half"
        real, imaginary = part.chunk(2, dim=-1) if halves else part.unflatten(-1, (-1, 2)).unbind(dim=-1)
        turned = real * cos - imaginary * sin, real * sin + imaginary * cos
        joined = torch.cat(turned, dim=-1) if halves else torch.stack(turned, dim=-1).flatten(-2)
        return torch.cat([states[..., :offset], joined.to(states.dtype), states[..., offset + width :]], dim=-1)


def _attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    unrotated: UnrotatedModel,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention modules call."""
    assert attention_mask is None
    check_request(module, others)
    window = window_of(module, sliding_window)
    attended = unrotated.attend(module.layer_idx, query[0], key[0], value[0], scaling, window, s_aux, softcap)
    return attended[None], None
