"""On random geometries every scheme that transformers has too agrees with transformers' own function.

transformers computes in float32, so agreement ends at its rounding.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model_patches.geometry import read_geometry
from model_patches.schemes import SCHEMES

FLOAT32 = 5e-6
THETAS = st.floats(min_value=1e3, max_value=1e7)
SMALL_THETAS = st.floats(min_value=20, max_value=200)  # so small that the ends of YaRN's ramp are clamped
HEAD_DIMS = st.integers(min_value=2, max_value=64).map(lambda pairs: 2 * pairs)
LENGTHS = st.integers(min_value=2, max_value=200_000)
FACTORS = st.floats(min_value=1.0, max_value=64.0)


def check(parameters: dict[str, Any], head_dim: int, longest: int, length: int, tolerance: float = FLOAT32) -> None:
    config = {"head_dim": head_dim, "max_position_embeddings": longest, "rope_parameters": parameters}
    geometry = read_geometry(config)
    scheme = parameters["rope_type"]
    ours = SCHEMES[scheme](geometry, parameters.get("factor", 1.0), length)
    theirs: Any = LlamaConfig(head_dim=head_dim, max_position_embeddings=longest, rope_parameters=dict(parameters))
    compute: Any = ROPE_INIT_FUNCTIONS.get(scheme, LlamaRotaryEmbedding.compute_default_rope_parameters)
    inv_freq, attention_factor = compute(theirs, seq_len=length)
    np.testing.assert_allclose(ours.inv_freq, inv_freq.double().numpy(), rtol=tolerance)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@given(head_dim=HEAD_DIMS, theta=THETAS)
@settings(deadline=None)
def test_default(head_dim: int, theta: float) -> None:
    check({"rope_type": "default", "rope_theta": theta}, head_dim, 2048, 2048)


@given(head_dim=HEAD_DIMS, theta=THETAS, factor=FACTORS)
@settings(deadline=None)
def test_linear(head_dim: int, theta: float, factor: float) -> None:
    check({"rope_type": "linear", "rope_theta": theta, "factor": factor}, head_dim, 2048, 2048)


@given(head_dim=HEAD_DIMS, theta=THETAS, factor=FACTORS, longest=LENGTHS, length=LENGTHS)
@settings(deadline=None)
def test_dynamic(head_dim: int, theta: float, factor: float, longest: int, length: int) -> None:
    check({"rope_type": "dynamic", "rope_theta": theta, "factor": factor}, head_dim, longest, length)


YARN_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "beta_fast": st.one_of(st.none(), st.floats(min_value=8, max_value=64)),
        "beta_slow": st.one_of(st.none(), st.floats(min_value=0.5, max_value=4)),
        "truncate": st.booleans(),
        "attention_factor": st.one_of(st.none(), st.floats(min_value=0.5, max_value=2)),
        "mscale": st.floats(min_value=0, max_value=2),
        "mscale_all_dim": st.floats(min_value=0, max_value=2),
    },
)


@given(head_dim=HEAD_DIMS, theta=SMALL_THETAS | THETAS, factor=FACTORS, original=LENGTHS, options=YARN_OPTIONS)
@settings(deadline=None, max_examples=300)
def test_yarn(head_dim: int, theta: float, factor: float, original: int, options: dict[str, Any]) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **options}
    parameters["original_max_position_embeddings"] = original
    check(parameters, head_dim, original, original)


@pytest.mark.parametrize("original", [2, 5, 6, 7])
def test_yarn_with_a_ramp_of_no_width(original: int) -> None:
    """At an original length of 6 both ends of the ramp are pair 0."""
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    check({**parameters, "original_max_position_embeddings": original}, 64, original, original)


@given(
    head_dim=HEAD_DIMS,
    theta=THETAS,
    factor=FACTORS,
    original=LENGTHS,
    low=st.floats(min_value=0.5, max_value=2),
    width=st.floats(min_value=0.5, max_value=6),
)
@settings(deadline=None, max_examples=200)
def test_llama3(head_dim: int, theta: float, factor: float, original: int, low: float, width: float) -> None:
    parameters = {"rope_type": "llama3", "rope_theta": theta, "factor": factor}
    parameters |= {"low_freq_factor": low, "high_freq_factor": low + width}
    # At the slow end of the ramp a rounding of γ, which float32 has there, weighs up to s times.
    tolerance = FLOAT32 * factor
    check({**parameters, "original_max_position_embeddings": original}, head_dim, original, original, tolerance)
