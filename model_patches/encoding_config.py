"""How a model knows positions, out of its config.json.

Knows the config shapes of models that rotate nothing; all others are `rope_config`'s. Does not know modules.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from model_patches.encoding import FixedEncoding, Positions, alibi_slopes, mpt_slopes
from model_patches.errors import UnsupportedModelError
from model_patches.rope_config import NativeRope, read_geometry

Config = Mapping[str, Any]

TRAINED = 2048  # of BLOOM, MPT and Falcon-RW (their papers), where a config does not say
_MPT_FIXED = {
    **{"alibi": True, "qk_ln": False, "prefix_lm": False, "attn_uses_sequence_id": False},
    "attn_type": "multihead_attention",
}
"""Of `attn_config`: all that transformers' MPT runs. It reads past other values, and past the weights that go with
them."""

_MPT_KINDS = {"no_bias": (True,), "norm_type": ("low_precision_layernorm", "layernorm"), "logit_scale": ()}
"""Likewise of the config itself."""


def read_positions(config: Config, native_rope: NativeRope | None = None) -> Positions:
    """Read from the content of a config.json how the model knows positions.

    Args:
        config: the content of config.json.
        native_rope: as for `read_geometry`; without a meaning for models that rotate nothing.

    Raises:
        UnsupportedModelError: something is missing, contradictory or not supported; the message names it.
    """
    read = _READERS.get(str(config.get("model_type")))
    encoding = None if read is None else read(config)
    return read_geometry(config, native_rope) if encoding is None else encoding


def _gpt2(config: Config) -> FixedEncoding:
    return FixedEncoding("learned", _count(config, "n_positions", "max_position_embeddings", default=1024))


def _opt(config: Config) -> FixedEncoding:
    return FixedEncoding("learned", _count(config, "max_position_embeddings", default=2048))


def _xglm(config: Config) -> FixedEncoding:
    return FixedEncoding("sinusoidal", _count(config, "max_position_embeddings", default=2048))


def _bloom(config: Config) -> FixedEncoding:
    slopes = alibi_slopes(_count(config, "n_head", "num_attention_heads", default=8))
    return FixedEncoding("alibi", _count(config, "seq_length", default=TRAINED), slopes)


def _mpt(config: Config) -> FixedEncoding:
    attention = config.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise UnsupportedModelError(f"attn_config must be an object, it is {attention!r}")
    for name, supported in _MPT_FIXED.items():
        if attention.get(name) not in (None, supported):
            raise UnsupportedModelError(f"attn_config.{name} is {attention[name]!r}; {supported!r} is supported")
    for name, kinds in _MPT_KINDS.items():
        if config.get(name) not in (None, *kinds):
            supported = " or ".join(map(repr, kinds)) or "none"
            raise UnsupportedModelError(f"{name} is {config[name]!r}; {supported} is supported")
    heads = _count(config, "n_heads", "num_attention_heads", default=16)
    slopes = mpt_slopes(heads, _count(attention, "alibi_bias_max", default=8))
    return FixedEncoding("alibi", _count(config, "max_seq_len", default=TRAINED), slopes)


def _falcon(config: Config) -> FixedEncoding | None:
    """None for one that rotates. As in its own code, slopes are bfloat16, and biases under the softmax scale too."""
    if not config.get("alibi"):
        return None
    heads = _count(config, "num_attention_heads", default=71)
    hidden = _count(config, "n_embed", "hidden_size", default=4544)
    if hidden % heads:
        raise UnsupportedModelError(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    head_dim = hidden // heads
    rounded = torch.tensor(alibi_slopes(heads)).bfloat16().double() / head_dim**0.5
    return FixedEncoding("alibi", _count(config, "max_position_embeddings", default=TRAINED), tuple(rounded.tolist()))


_READERS: Mapping[str, Callable[[Config], FixedEncoding | None]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "xglm": _xglm,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon": _falcon,
}


def _count(config: Config, *names: str, default: int) -> int:
    """The first of these fields that is given: a whole number, at least 1."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return default
    value = config[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"{name} must be a whole number of at least 1, it is {value!r}")
    return value
