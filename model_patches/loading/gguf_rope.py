"""The positional scaling that a GGUF file asks for, as a config's `rope_parameters`.

transformers' GGUF reader takes over the base only, so a model trained with its scaling would silently run unscaled.
Knows where llama.cpp keeps scaling. Does not know the formulas of serving.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_patches.errors import UnsupportedModelError
from model_patches.loading.gguf_file import GgufFile

# llama.cpp stores Llama 3's scaling as one divisor for each frequency; every such model was made with these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_scaling_of(file: GgufFile) -> dict[str, Any]:
    """`rope_type` and the options that go with it; empty where the file asks for no scaling.

    Raises:
        UnsupportedModelError: a kind of scaling that cannot be taken over.
    """
    kind = file.of_architecture("rope.scaling.type") or "none"
    divisors = file.floats("rope_freqs.weight")
    if divisors is not None:
        return _llama3(file, divisors)
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path} asks for positional scaling of the kind {kind!r}, which cannot be read from a GGUF file; "
            "supported: none, linear, yarn, Llama 3's. Use the model's Hugging Face folder instead"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(file.of_architecture("rope.scaling.factor") or 1.0)}
    if original := file.of_architecture("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _llama3(file: GgufFile, divisors: NDArray[np.float32]) -> dict[str, Any]:
    factor = float(divisors.max())
    theta = float(file.of_architecture("rope.freq_base") or 10_000.0)
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
