"""The weights of a GGUF file in the order that transformers' modules have them: what llama.cpp's converter did, undone.

Knows both orders, family by family. Does not know files, or configs beyond counts of heads.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float32]
Layout = Callable[[str, Weights, Any], Weights]
"""(name in the model, the file's weights for it, config) → the weights; those of experts are gates, then ups."""


def as_stored(_name: str, weights: Weights, _config: Any) -> Weights:
    """Nothing to undo."""
    return weights


def neighbours_paired(name: str, weights: Weights, config: Any) -> Weights:
    """Llama and its kin: llama.cpp rotates dimensions 2i and 2i + 1 of a head, transformers i and i + half."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weights
    return weights.reshape(heads, len(weights) // heads // 2, 2, -1).swapaxes(1, 2).reshape(weights.shape)


def norms_from_one(name: str, weights: Weights, _config: Any) -> Weights:
    """Gemma: a norm multiplies by 1 + weight, and llama.cpp stores the sum."""
    return weights - 1 if name.endswith("norm.weight") else weights


def transposed(name: str, weights: Weights, _config: Any) -> Weights:
    """GPT-2: its linear layers keep a column for each output."""
    return weights.T if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) else weights


def head_by_head(name: str, weights: Weights, config: Any) -> Weights:
    """BLOOM and GPT-NeoX: query, key and value of the first head, then of the next; llama.cpp stores all queries first.

    Falcon alike, but by groups: the queries that share a key, that key, its value.
    """
    if "query_key_value" not in name:
        return weights
    heads = config.num_attention_heads
    groups = getattr(config, "num_kv_heads", heads)  # Falcon's
    width = config.hidden_size // heads
    queries_keys_values = np.split(weights, [heads * width, (heads + groups) * width])
    by_group = [part.reshape(groups, -1, *weights.shape[1:]) for part in queries_keys_values]
    return np.concatenate(by_group, axis=1).reshape(weights.shape)


def gates_and_ups_in_turn(name: str, weights: Weights, _config: Any) -> Weights:
    """gpt-oss: experts have gate, up, gate, up … along the last dimension, and a column for each output."""
    if ".experts." not in name:
        return weights
    if ".gate_up_proj" in name:
        rows = weights.shape[1]
        weights = weights[:, np.arange(rows).reshape(2, -1).T.ravel()]
    return weights.swapaxes(1, 2) if weights.ndim == 3 else weights
