"""Real models' rotary numbers as their config.json has them, and what must be read out of them.

The configs hold the published values of the fields that matter, and leave out what the published files leave out; the
tables of longrope are stand-ins of the right length, for their numbers decide nothing here. What is expected is written
by hand, from model cards and reports.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from model_patches.geometry import Layout, RopeGeometry
from model_patches.loading.clex_weights import with_clex_weights

K = 1024
PHI_TABLES = {"short_factor": [1.0] * 48, "long_factor": [32.0] * 48}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
MISTRAL = {"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32}
QWEN2 = {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "rope_theta": 1000000.0}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
}
PHI3 = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
LATENT = {"num_attention_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@dataclass(frozen=True)
class Expected:
    """What a config says, and what is served where nothing is configured.

    Attributes:
        head_dim: of the heads that are rotated in part or whole; with latent attention of its rotated part.
        scheme: of the native plan.
        trained: the longest sequence that the config covers.
        longest: the longest sequence served.
        ladder: the factors that plans are made for; None where the policy is free to choose them.
        local: layers that see a window: their base and rotary dimension, where they have their own.
    """

    head_dim: int
    rotary_dim: int
    theta: float
    original: int
    native: int
    trained: int
    longest: int
    ladder: tuple[float, ...] | None
    scheme: str = "default"
    factor: float = 1.0
    layout: Layout = "half"
    local: tuple[float, int] | None = None


@dataclass(frozen=True)
class Family:
    """One published model."""

    name: str
    config: Mapping[str, Any]
    expected: Expected


FOUR = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)


def unscaled(head_dim: int, native: int, theta: float, **others: Any) -> Expected:
    """A model without a scaling block: it is stretched up to four times."""
    whole = {"rotary_dim": head_dim, "trained": native, "longest": 4 * native, "ladder": FOUR, **others}
    return Expected(head_dim=head_dim, theta=theta, original=native, native=native, **whole)


def scaled(scheme: str, factor: float, original: int, native: int, **others: Any) -> Expected:
    """A model trained with its scaling: its own plan is all there is."""
    whole = {"head_dim": 128, "rotary_dim": 128, "longest": native, "ladder": (factor,), **others}
    return Expected(scheme=scheme, factor=factor, original=original, native=native, trained=native, **whole)


def two_tables(scheme: str, factor: float, native: int, **others: Any) -> Expected:
    """A model with plans of its own beyond the native length."""
    trained = int(native * factor)
    whole = {"longest": trained, "ladder": (1.0, factor), "original": native, "native": native, **others}
    return Expected(scheme=scheme, factor=factor, trained=trained, theta=10000.0, **whole)


def with_stand_in_weights(geometry: RopeGeometry) -> RopeGeometry:
    """The geometry of a model whose plans are in its weights (CLEX) with weights that stretch nothing; others as they
    are."""
    if geometry.scheme != "clex":
        return geometry
    pairs = geometry.rotary_dim // 2
    zeros = {"ode_up_proj": np.zeros((pairs, 2 * pairs)), "ode_down_proj": np.zeros((2 * pairs, pairs))}
    return with_clex_weights(geometry, zeros)


FAMILIES: tuple[Family, ...] = (
    Family(
        "Llama 2 7B",
        {**LLAMA, "max_position_embeddings": 4096, "rope_scaling": None, "transformers_version": "4.31.0.dev0"},
        unscaled(128, 4 * K, 10000.0),
    ),
    Family(
        "Llama 3 8B",
        {**LLAMA, "max_position_embeddings": 8192, "rope_scaling": None, "rope_theta": 500000.0},
        unscaled(128, 8 * K, 500000.0),
    ),
    Family(
        "Llama 3.1 8B",
        {
            **LLAMA,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        scaled("llama3", 8.0, 8 * K, 128 * K, theta=500000.0),
    ),
    Family(
        "SmolLM2 135M",
        {
            "model_type": "llama",
            "hidden_size": 576,
            "num_attention_heads": 9,
            "max_position_embeddings": 8192,
            "rope_scaling": None,
            "rope_theta": 100000,
        },
        unscaled(64, 8 * K, 100000.0),
    ),
    Family(
        "SmolLM2 1.7B",
        {
            "model_type": "llama",
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "max_position_embeddings": 8192,
            "rope_scaling": None,
            "rope_theta": 130000,
        },
        unscaled(64, 8 * K, 130000.0),
    ),
    Family(
        "SmolLM3 3B",
        {
            "model_type": "smollm3",
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "max_position_embeddings": 65536,
            "no_rope_layer_interval": 4,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
        },
        unscaled(128, 64 * K, 5000000.0),
    ),
    Family(
        "Mistral 7B v0.1",
        {**MISTRAL, "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096},
        unscaled(128, 32 * K, 10000.0),
    ),
    Family(
        "Mistral 7B v0.3",
        {**MISTRAL, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None},
        unscaled(128, 32 * K, 1000000.0),
    ),
    Family(
        "Mixtral 8x7B",
        {**MISTRAL, "model_type": "mixtral", "max_position_embeddings": 32768, "rope_theta": 1000000.0},
        unscaled(128, 32 * K, 1000000.0),
    ),
    Family("Qwen2 7B Instruct", {**QWEN2, "max_position_embeddings": 32768}, unscaled(128, 32 * K, 1000000.0)),
    Family(
        "Qwen2.5 7B Instruct",
        {**QWEN2, "max_position_embeddings": 32768, "sliding_window": 131072, "use_sliding_window": False},
        unscaled(128, 32 * K, 1000000.0),
    ),
    Family(
        "Qwen2.5 7B Instruct, the card's block",
        {
            **QWEN2,
            "max_position_embeddings": 32768,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
        unscaled(128, 32 * K, 1000000.0, trained=128 * K),
    ),
    Family("Qwen3 8B", {**QWEN3, "rope_scaling": None}, unscaled(128, 40 * K, 1000000.0)),
    Family(
        "Qwen3 8B, the card's block",
        {**QWEN3, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        unscaled(128, 32 * K, 1000000.0, trained=128 * K),
    ),
    Family(
        "Qwen3 30B A3B",
        {**QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "rope_scaling": None},
        unscaled(128, 40 * K, 1000000.0),
    ),
    Family(
        "Phi-2",
        {
            "model_type": "phi",
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.4,
            "rope_scaling": None,
            "rope_theta": 10000.0,
        },
        unscaled(80, 2 * K, 10000.0, rotary_dim=32),
    ),
    Family(
        "Phi-3 mini 128k",
        {**PHI3, "rope_scaling": {"type": "su", **PHI_TABLES}},
        two_tables("longrope", 32.0, 4 * K, head_dim=96, rotary_dim=96),
    ),
    Family(
        "Phi-3.5 mini",
        {**PHI3, "rope_scaling": {"type": "longrope", **PHI_TABLES}},
        two_tables("longrope", 32.0, 4 * K, head_dim=96, rotary_dim=96),
    ),
    Family(
        "Phi-4 mini",
        {
            **PHI3,
            "num_attention_heads": 24,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", **PHI_TABLES},
        },
        two_tables("longrope", 32.0, 4 * K, head_dim=128, rotary_dim=96),
    ),
    Family(
        "Gemma 2 9B",
        {
            "model_type": "gemma2",
            "hidden_size": 3584,
            "num_attention_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
        },
        unscaled(256, 8 * K, 10000.0),
    ),
    Family(
        "Gemma 3 1B",
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "num_attention_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        unscaled(256, 32 * K, 1000000.0, local=(10000.0, 256)),
    ),
    Family(
        "Gemma 3 4B",
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
        scaled("linear", 8.0, 32 * K, 128 * K, head_dim=256, rotary_dim=256, theta=1000000.0, local=(10000.0, 256)),
    ),
    Family(
        "Gemma 3 4B, saved by version 5",
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_attention_heads": 8,
                "head_dim": 256,
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                },
            },
        },
        scaled("linear", 8.0, 32 * K, 128 * K, head_dim=256, rotary_dim=256, theta=1000000.0, local=(10000.0, 256)),
    ),
    Family(
        "GLM-4 9B 0414",
        {
            "model_type": "glm4",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
        },
        unscaled(128, 32 * K, 10000.0, rotary_dim=64, layout="interleaved"),
    ),
    Family(
        "GPT-NeoX 20B",
        {
            "model_type": "gpt_neox",
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "max_position_embeddings": 2048,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
        },
        unscaled(96, 2 * K, 10000.0, rotary_dim=24),
    ),
    Family(
        "Pythia 6.9B",
        {
            "model_type": "gpt_neox",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
        },
        unscaled(128, 2 * K, 10000.0, rotary_dim=32),
    ),
    Family(
        "OLMo 2 7B",
        {**LLAMA, "model_type": "olmo2", "max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 500000},
        unscaled(128, 4 * K, 500000.0),
    ),
    Family(
        "Olmo 3 7B",
        {
            **LLAMA,
            "model_type": "olmo3",
            "max_position_embeddings": 65536,
            "rope_theta": 500000,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "sliding_window": 4096,
        },
        scaled("yarn", 8.0, 8 * K, 64 * K, theta=500000.0, local=(500000.0, 128)),
    ),
    Family(
        "Granite 3.3 8B",
        {**LLAMA, "model_type": "granite", "max_position_embeddings": 131072, "rope_theta": 10000000.0},
        unscaled(128, 128 * K, 10000000.0),
    ),
    Family(
        "DeepSeek-V2",
        {
            **LATENT,
            "model_type": "deepseek_v2",
            "hidden_size": 5120,
            "max_position_embeddings": 163840,
            "rope_theta": 10000,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
        },
        scaled("yarn", 40.0, 4 * K, 160 * K, head_dim=64, rotary_dim=64, theta=10000.0, layout="interleaved"),
    ),
    Family(
        "DeepSeek-V3",
        {
            **LATENT,
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "max_position_embeddings": 163840,
            "rope_theta": 10000,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
        },
        scaled("yarn", 40.0, 4 * K, 160 * K, head_dim=64, rotary_dim=64, theta=10000.0),
    ),
    Family(
        "Kimi K2",
        {
            **LATENT,
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "num_attention_heads": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 50000.0,
            "rope_scaling": {
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
        },
        scaled("yarn", 32.0, 4 * K, 128 * K, head_dim=64, rotary_dim=64, theta=50000.0),
    ),
    Family(
        "gpt-oss 20B",
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "head_dim": 64,
            "initial_context_length": 4096,
            "max_position_embeddings": 131072,
            "rope_theta": 150000,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
        },
        scaled("yarn", 32.0, 4 * K, 128 * K, head_dim=64, rotary_dim=64, theta=150000.0),
    ),
    Family(
        "Falcon 7B",
        {
            "model_type": "falcon",
            "alibi": False,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "transformers_version": "4.27.4",
        },
        unscaled(64, 2 * K, 10000.0),
    ),
    Family(
        "StableLM 2 1.6B",
        {
            "model_type": "stablelm",
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000,
        },
        unscaled(64, 4 * K, 10000.0, rotary_dim=16),
    ),
    Family(
        "StarCoder2 7B",
        {
            "model_type": "starcoder2",
            "hidden_size": 4608,
            "num_attention_heads": 36,
            "max_position_embeddings": 16384,
            "rope_theta": 1000000,
            "sliding_window": 4096,
        },
        unscaled(128, 16 * K, 1000000.0),
    ),
    Family(
        "Command R v01",
        {
            "model_type": "cohere",
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "max_position_embeddings": 8192,
            "model_max_length": 131072,
            "rope_scaling": None,
            "rope_theta": 8000000.0,
        },
        unscaled(128, 128 * K, 8000000.0, layout="interleaved"),
    ),
    Family(
        "ModernBERT base",
        {
            "model_type": "modernbert",
            "hidden_size": 768,
            "num_attention_heads": 12,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_attention": 128,
            "local_rope_theta": 10000.0,
            "max_position_embeddings": 8192,
        },
        unscaled(64, 8 * K, 160000.0, local=(10000.0, 64)),
    ),
    Family(
        "Yarn-Llama-2 7B 64k",
        {
            **LLAMA,
            "max_position_embeddings": 4096,
            "rope_scaling": {
                "factor": 16.0,
                "finetuned": True,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "transformers_version": "4.32.0.dev0",
        },
        scaled("yarn", 16.0, 4 * K, 64 * K, theta=10000.0),
    ),
    Family(
        "CLEX 7B 16K",
        {
            **LLAMA,
            "max_position_embeddings": 4096,
            "rope_scaling": {"type": "clex", "max_factor": 16, "param_factor": 1, "act": "silu", "factor": 1},
            "transformers_version": "4.31.0",
        },
        two_tables("clex", 16.0, 4 * K, head_dim=128, rotary_dim=128, ladder=None),
    ),
)
