"""How a GGUF file rotates, as a config's `rope_parameters`.

Knows where llama.cpp keeps base, width and scaling. Does not know the formulas of serving.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_patches.errors import UnsupportedModelError
from model_patches.loading.gguf_file import GgufFile

ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that are read here and are no weights."""
THETA = 10_000.0  # llama.cpp's, of a file that names none

# llama.cpp stores Llama 3's scaling as one divisor for each frequency; every such model was made with these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN_NAMES = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
# What changes angles or their size in a way that no config says, and the values that do nothing.
_NOT_TAKEN_OVER = {"yarn_ext_factor": (1.0, -1.0), "yarn_log_multiplier": (0.0,), "alpha": (0.0, 1.0)}


def head_dim_of(file: GgufFile) -> int:
    """How wide a head's keys are."""
    own = file.count("attention.key_length", 0)
    return own or file.count("embedding_length") // file.count("attention.head_count")


def rope_parameters_of(file: GgufFile, *, partial: bool) -> dict[str, Any]:
    """`rope_type`, `rope_theta`, the share of a head that is rotated where it is not the whole, and the scaling.

    Args:
        partial: whether the family's models can leave a part of a head unrotated.

    Raises:
        UnsupportedModelError: a width or a kind of scaling that cannot be taken over.
    """
    base = {"rope_type": "default", "rope_theta": file.number("rope.freq_base", THETA)}
    return {**base, **_share(file, partial), **_scaling(file)}


def _share(file: GgufFile, partial: bool) -> dict[str, float]:
    head, rotated = head_dim_of(file), file.count("rope.dimension_count", head_dim_of(file))
    if rotated == head:
        return {"partial_rotary_factor": 1.0} if partial else {}  # else the class's default would hold
    share = rotated / head
    if not partial or int(head * share) != rotated:
        raise UnsupportedModelError(
            f"{file.path} has heads {head} wide but {file.architecture}.rope.dimension_count {rotated}, "
            "which cannot be read from a GGUF file; use the model's Hugging Face folder instead"
        )
    return {"partial_rotary_factor": share}


def _scaling(file: GgufFile) -> dict[str, Any]:
    """`rope_type` and the options that go with it; empty where the file asks for no scaling."""
    for key, neutral in _NOT_TAKEN_OVER.items():
        if (value := file.number(f"rope.scaling.{key}", neutral[0])) not in neutral:
            raise UnsupportedModelError(_not_read(file, f"rope.scaling.{key}", value))
    if (long := file.floats("rope_factors_long.weight")) is not None:
        return _longrope(file, long)
    if (size := file.number("rope.scaling.attn_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(_not_read(file, "rope.scaling.attn_factor", size))
    if (divisors := file.floats("rope_freqs.weight")) is not None:
        return _llama3(file, divisors)
    factor = file.number("rope.scaling.factor", file.number("rope.scale_linear", 0.0)) or 1.0
    kind = file.of_architecture("rope.scaling.type") or ("none" if factor == 1.0 else "linear")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path} asks for positional scaling of the kind {kind!r}, which cannot be read from a GGUF file; "
            "supported: none, linear, yarn, Llama 3's, and LongRoPE with its factors. "
            "Use the model's Hugging Face folder instead"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original := file.count("rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        options = {name: file.of_architecture(f"rope.scaling.{key}") for key, name in _YARN_NAMES.items()}
        scaling |= {name: float(str(np.float32(value))) for name, value in options.items() if value is not None}
    return scaling


def _longrope(file: GgufFile, long: NDArray[np.float32]) -> dict[str, Any]:
    """LongRoPE (2402.13753) as Phi-3's converter writes it: two tables, the length that was trained first, and √(1 + ln
    of the factor / ln of that length), by which queries and keys are multiplied."""
    short = file.floats("rope_factors_short.weight")
    if short is None:
        raise UnsupportedModelError(f"{file.path} has rope_factors_long.weight, but no rope_factors_short.weight")
    return {
        "rope_type": "longrope",
        "long_factor": [float(str(value)) for value in long],
        "short_factor": [float(str(value)) for value in short],
        "original_max_position_embeddings": int(file.required("rope.scaling.original_context_length")),
        "attention_factor": file.number("rope.scaling.attn_factor", 1.0),
    }


def _llama3(file: GgufFile, divisors: NDArray[np.float32]) -> dict[str, Any]:
    factor = float(divisors.max())
    theta = file.number("rope.freq_base", THETA)
    if not np.allclose(divisors, _llama3_divisors(theta, 2 * len(divisors), factor), rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path} scales each frequency on its own (rope_freqs.weight), and not as Llama 3 does; "
            "use the model's Hugging Face folder instead"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_divisors(theta: float, rotary_dim: int, factor: float) -> NDArray[np.float64]:
    frequencies = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _not_read(file: GgufFile, key: str, value: object) -> str:
    return (
        f"{file.path} says {file.architecture}.{key} {value}, which cannot be read from a GGUF file; "
        "use the model's Hugging Face folder instead"
    )
