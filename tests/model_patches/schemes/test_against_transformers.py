"""On random geometries every scheme that transformers has too agrees with transformers' own function.

transformers computes in float32, so agreement ends at its rounding.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model_patches.geometry import RopeGeometry
from model_patches.rope_config import read_geometry
from model_patches.schemes import SCHEMES, Frequencies

FLOAT32 = 5e-6
THETAS = st.floats(min_value=1e3, max_value=1e7)
SMALL_THETAS = st.floats(min_value=20, max_value=200)  # so small that the ends of YaRN's ramp are clamped
HEAD_DIMS = st.integers(min_value=2, max_value=64).map(lambda pairs: 2 * pairs)
LENGTHS = st.integers(min_value=2, max_value=200_000)
FACTORS = st.floats(min_value=1.0, max_value=64.0)


def check(parameters: dict[str, Any], head_dim: int, longest: int, length: int, tolerance: float = FLOAT32) -> None:
    config = {"head_dim": head_dim, "max_position_embeddings": longest, "rope_parameters": parameters}
    geometry = read_geometry(config)
    ours = SCHEMES[parameters["rope_type"]](geometry, geometry.factor, length)
    check_frequencies(ours, parameters, head_dim, longest, length, tolerance)


def check_frequencies(
    ours: Frequencies,
    parameters: dict[str, Any],
    head_dim: int,
    longest: int,
    length: int,
    tolerance: float = FLOAT32,
) -> None:
    """Against what transformers computes for these rope parameters."""
    theirs: Any = LlamaConfig(head_dim=head_dim, max_position_embeddings=longest, rope_parameters=dict(parameters))
    compute: Any = ROPE_INIT_FUNCTIONS.get(
        parameters["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    inv_freq, attention_factor = compute(theirs, seq_len=length)
    np.testing.assert_allclose(ours.inv_freq, inv_freq.double().numpy(), rtol=tolerance)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_no_scheme_of_both_is_left_out() -> None:
    assert SCHEMES.keys() & ROPE_INIT_FUNCTIONS.keys() == {"linear", "dynamic", "yarn", "longrope", "llama3"}


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


@given(head_dim=HEAD_DIMS, theta=THETAS, original=LENGTHS, stretch=FACTORS, options=YARN_OPTIONS)
@settings(deadline=None)
def test_yarn_without_a_factor(
    head_dim: int, theta: float, original: int, stretch: float, options: dict[str, Any]
) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": None, **options}
    parameters["original_max_position_embeddings"] = original
    longest = int(stretch * original)
    check(parameters, head_dim, longest, longest)


@given(head_dim=HEAD_DIMS, theta=THETAS, original=LENGTHS, length=LENGTHS, options=YARN_OPTIONS)
@settings(deadline=None)
def test_dynamic_yarn_is_their_yarn_at_the_ratio_of_lengths(
    head_dim: int, theta: float, original: int, length: int, options: dict[str, Any]
) -> None:
    ours = RopeGeometry(head_dim, theta, original, original, "dynamic-yarn", parameters=options)
    factor = max(1.0, length / original)
    parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **options}
    parameters["original_max_position_embeddings"] = original
    check_frequencies(SCHEMES["dynamic-yarn"](ours, 1.0, length), parameters, head_dim, original, length)


@given(head_dim=HEAD_DIMS, theta=THETAS, original=LENGTHS, factor=FACTORS, options=YARN_OPTIONS)
@settings(deadline=None)
def test_ntk_by_parts_is_their_yarn_without_sharpening(
    head_dim: int, theta: float, original: int, factor: float, options: dict[str, Any]
) -> None:
    ours = RopeGeometry(head_dim, theta, original, original, "ntk-by-parts", factor, options)
    parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **options, "attention_factor": 1.0}
    parameters["original_max_position_embeddings"] = original
    check_frequencies(SCHEMES["ntk-by-parts"](ours, factor, original), parameters, head_dim, original, original)


@given(head_dim=HEAD_DIMS, theta=THETAS, original=LENGTHS, factor=st.integers(min_value=1, max_value=64))
@settings(deadline=None)
def test_ntk_is_their_dynamic_at_that_many_times_the_length(
    head_dim: int, theta: float, original: int, factor: int
) -> None:
    ours = RopeGeometry(head_dim, theta, original, original)
    parameters = {"rope_type": "dynamic", "rope_theta": theta, "factor": 1.0}
    check_frequencies(SCHEMES["ntk"](ours, factor, 1), parameters, head_dim, original, factor * original)


PARTIAL: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 4096},
    "llama3": {
        **{"factor": 3.0, "original_max_position_embeddings": 4096},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
}


@pytest.mark.parametrize("scheme", PARTIAL)
@given(head_dim=HEAD_DIMS, theta=THETAS, pairs=st.integers(min_value=2, max_value=64))
@settings(deadline=None)
def test_heads_that_are_rotated_in_part(scheme: str, head_dim: int, theta: float, pairs: int) -> None:
    share = min(2 * pairs / head_dim, 1.0)
    assume(int(head_dim * share) % 2 == 0)
    parameters = {"rope_type": scheme, "rope_theta": theta, "partial_rotary_factor": share, **PARTIAL[scheme]}
    check(parameters, head_dim, 4096, 9000, FLOAT32 * 3)


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
