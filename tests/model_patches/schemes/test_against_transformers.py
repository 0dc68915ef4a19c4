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

from model_patches.rope_config import read_geometry
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
    ours = SCHEMES[scheme](geometry, parameters.get("factor") or 1.0, length)
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


@st.composite
def longrope_blocks(draw: st.DrawFn, head_dim: int) -> dict[str, Any]:
    tables = st.lists(st.floats(min_value=0.25, max_value=100), min_size=head_dim // 2, max_size=head_dim // 2)
    block = {"rope_type": "longrope", "short_factor": draw(tables), "long_factor": draw(tables)}
    optional = {"factor": st.none() | FACTORS, "attention_factor": st.none() | st.floats(min_value=0.5, max_value=2)}
    return block | draw(st.fixed_dictionaries({}, optional=optional))


@given(theta=THETAS, original=LENGTHS, stretch=FACTORS, data=st.data())
@settings(deadline=None, max_examples=200)
def test_longrope(theta: float, original: int, stretch: float, data: st.DataObject) -> None:
    head_dim = 2 * data.draw(st.integers(min_value=2, max_value=16), label="pairs")
    block = data.draw(longrope_blocks(head_dim), label="block")
    parameters = {**block, "rope_theta": theta, "original_max_position_embeddings": original}
    length = data.draw(st.sampled_from([1, original - 1, original, original + 1]) | LENGTHS, label="length")
    check(parameters, head_dim, int(stretch * original), length)


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
