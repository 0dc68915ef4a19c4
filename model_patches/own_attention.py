"""Attention of models whose code does not leave it to transformers' AttentionInterface.

Knows the attention modules of BLOOM, MPT, Falcon and XGLM: their products, and how heads lie in them. Does not know
what attention does: that is the function registered under the config's name, as for all other models. Nothing of the
models but the forward of these modules is replaced, and that of one model object only.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

Attend = Callable[..., torch.Tensor]
"""(query, key, value, scale), the first three [1, heads, T, dim] → [1, T, heads * value_dim]."""

_UNREAD_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
"""Transformers hands it on as it is, for it has four dimensions. MPT's code cannot do without one; nobody reads it."""


class OwnAttention:
    """What attention modules of one model are told of the step under way, since the model hands nothing on to them."""

    def __init__(self, model: Any, implementation: str, slopes: torch.Tensor | None) -> None:
        """Replace the forward of a model's attention modules.

        Args:
            model: one that `is_own` is true of.
            implementation: the name of the function that attends.
            slopes: float32 [heads], of ALiBi.
        """
        self._config = model.config
        self._slopes = slopes
        self._keywords: Mapping[str, Any] = {}
        self.use(implementation)
        name, forward = _FORWARDS[model.config.model_type]
        for module in model.modules():
            if type(module).__name__ == name:
                module.forward = partial(forward, module, partial(self._attend, module))

    def use(self, implementation: str) -> None:
        """Attend by another function; transformers would refuse to say so to these models, and builds no masks for
        functions that it has none for."""
        self._config._attn_implementation_internal = implementation

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model itself has to be called with."""
        return {"attention_mask": _UNREAD_MASK} if self._config.model_type == "mpt" else {}

    @contextmanager
    def told(self, **keywords: Any) -> Iterator[None]:
        """Give the function these keyword arguments while the block runs."""
        self._keywords = keywords
        try:
            yield
        finally:
            self._keywords = {}

    def _attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        function: Any = AttentionInterface()[self._config._attn_implementation]
        slopes = {} if self._slopes is None else {"slopes": self._slopes}
        attended, _ = function(module, query, key, value, None, scaling=scale, **slopes, **self._keywords)
        flat: torch.Tensor = attended.flatten(2)
        return flat


def is_own(model: Any) -> bool:
    """Whether a model attends in code of its own."""
    return model.config.model_type in _FORWARDS


def falcon_key_heads(config: Any) -> int:
    """Heads of the keys of a Falcon model: its `num_kv_heads` counts in two of its three layouts only."""
    if config.new_decoder_architecture or not config.multi_query:
        return int(config.num_kv_heads)
    return 1


def _bloom(
    module: Any, attend: Attend, hidden: torch.Tensor, residual: torch.Tensor, **_others: Any
) -> tuple[torch.Tensor, None]:
    """The product's columns: of each head its query, key and value."""
    joint = module.query_key_value(hidden).unflatten(-1, (module.num_heads, 3, module.head_dim))
    query, key, value = (part.transpose(1, 2) for part in joint.unbind(dim=3))
    return module.dense(attend(query, key, value, module.inv_norm_factor)) + residual, None


def _mpt(module: Any, attend: Attend, hidden: torch.Tensor, **_others: Any) -> tuple[torch.Tensor, None]:
    """The product's columns: all queries, all keys, all values."""
    joint = module.Wqkv(hidden)
    if module.clip_qkv:
        joint = joint.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = joint.unflatten(-1, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    return module.out_proj(attend(query, key, value, module.softmax_scale)), None


def _falcon(
    module: Any,
    attend: Attend,
    hidden: torch.Tensor,
    alibi: torch.Tensor | None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """The product's columns: of each key head its queries, then its key and value, whichever architecture it is."""
    kv_heads = falcon_key_heads(module.config)
    joint = module.query_key_value(hidden).unflatten(-1, (kv_heads, -1, module.head_dim))
    query, key, value = joint[..., :-2, :].flatten(2, 3), joint[..., -2, :], joint[..., -1, :]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    if alibi is None:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        assert position_embeddings is not None
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    return module.dense(attend(query, key, value, module.inv_norm_factor)), None


def _xglm(module: Any, attend: Attend, hidden_states: torch.Tensor, **_others: Any) -> tuple[torch.Tensor, None]:
    products = (module.q_proj, module.k_proj, module.v_proj)
    heads = (module.num_heads, module.head_dim)
    query, key, value = (product(hidden_states).unflatten(-1, heads).transpose(1, 2) for product in products)
    return module.out_proj(attend(query, key, value, module.scaling)), None


_FORWARDS: Mapping[str, tuple[str, Callable[..., tuple[torch.Tensor, None]]]] = {
    "bloom": ("BloomAttention", _bloom),
    "mpt": ("MptAttention", _mpt),
    "falcon": ("FalconAttention", _falcon),
    "xglm": ("XGLMAttention", _xglm),
}
"""By model type: the class of its attention modules, and their forward."""
