"""What a config.json does not say about its model, because every model of its type has it.

Knows model types by name, as transformers 5.24 runs them. Does not know config shapes or schemes.
"""

import re
from collections.abc import Mapping
from typing import Any

from model_patches.geometry import Layout

# Whose cached keys pair dimensions 2i and 2i + 1. DeepSeek-V3 and its kin sort a key's halves apart as they rotate it,
# so that theirs are not among them; DeepSeek-V2 rotates in place.
INTERLEAVED = frozenset(
    {
        *("codegen", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "ernie4_5", "ernie4_5_moe"),
        *("ernie4_5_vl_moe_text", "glm", "glm4", "glm4v_text", "glm_ocr_text", "gptj", "helium", "hy_v4_vl_text"),
        "llama4_text",
    }
)
BACKWARDS = frozenset({"nanochat"})  # rotates by −θ: its cached keys could not be moved to another plan

# Fields that published configs leave out. Gemma 3's pre-training length is from its report (2503.19786, section 2).
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "falcon": {"max_position_embeddings": 2048},
    "gemma3_text": {
        "num_attention_heads": 8,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.25},
    "nemotron": {"partial_rotary_factor": 0.5},
    "persimmon": {"partial_rotary_factor": 0.5},
    "phi": {"partial_rotary_factor": 0.5},
    "qwen3_next": {"partial_rotary_factor": 0.25},
    "stablelm": {"partial_rotary_factor": 0.25},
}
# Whose `max_position_embeddings` is all that was trained, whatever the factor beside it.
TRAINED_WHOLE = frozenset({"gemma3_text"})
# Whose `model_max_length` is what was trained, and `max_position_embeddings` what serving was thought to need.
TRAINED_LONGER = frozenset({"cohere", "cohere2"})
# Whose model cards tell users to add a YaRN block for texts longer than the model was trained on.
BLOCK_IS_CEILING = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"})
# Whose windowed layers have the base of all layers, but not their scaling.
LOCAL_UNSCALED = frozenset({"olmo3"})
# Whose `rope_scaling` holds for the windowed layers too.
LOCAL_SCALED = frozenset({"modernbert", "modernbert-decoder"})

# Before the version 4.33 of transformers these types had no `rope_theta`: the code rotated by this base.
FIXED_THETA = {"falcon": 1e4, "llama": 1e4}
THETA_IS_A_FIELD = (4, 33)


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with what every model of its type has, where it does not say otherwise."""
    stated = {name: value for name, value in config.items() if value is not None}
    return {**DEFAULTS.get(model_type(config), {}), **stated}


def model_type(config: Mapping[str, Any]) -> str:
    """The config's `model_type`, empty where it names none."""
    return str(config.get("model_type") or "")


def layout(config: Mapping[str, Any]) -> Layout:
    """Which dimensions of a cached key are rotated together."""
    return "interleaved" if model_type(config) in INTERLEAVED else "half"


def fixed_theta(config: Mapping[str, Any]) -> float | None:
    """The base of a config that is older than the field for it; None for all others."""
    version = re.match(r"(\d+)\.(\d+)", str(config.get("transformers_version")))
    if version is None or (int(version[1]), int(version[2])) >= THETA_IS_A_FIELD:
        return None
    return FIXED_THETA.get(model_type(config))


def is_ceiling(config: Mapping[str, Any], scheme: str) -> bool:
    """Whether a block with this scheme was added for texts longer than the model was trained on."""
    return scheme == "yarn" and model_type(config) in BLOCK_IS_CEILING
