"""Every config shape met in the wild is read, and what cannot be served is refused by name."""

from typing import Any

import pytest

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.plan import make_plan
from model_patches.rope_config import read_geometry
from model_patches.schemes import SCHEMES

SMALL = {"hidden_size": 576, "num_attention_heads": 9, "max_position_embeddings": 8192}
PLAIN = {**SMALL, "rope_theta": 1e5}


def test_version_4_unscaled() -> None:
    expected = RopeGeometry(rotary_dim=64, theta=1e5, original_length=8192, native_length=8192)
    assert read_geometry({**PLAIN, "rope_scaling": None}) == expected
    assert read_geometry(PLAIN) == expected


def test_version_5_unscaled() -> None:
    config = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    assert read_geometry(config) == read_geometry(PLAIN)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("block", ["rope_scaling", "rope_parameters"])
def test_a_scheme_is_named_by_either_key_in_either_block(block: str, key: str) -> None:
    geometry = read_geometry({**PLAIN, block: {key: "linear", "factor": 4.0}})
    assert (geometry.scheme, geometry.factor) == ("linear", 4.0)


def test_the_theta_inside_the_block_wins() -> None:
    assert read_geometry({**PLAIN, "rope_parameters": {"rope_theta": 5e5}}).theta == 5e5


def test_gpt_neox_names_its_theta_and_share_differently() -> None:
    config = {**SMALL, "rotary_emb_base": 10000, "rotary_pct": 0.25}
    assert (read_geometry(config).theta, read_geometry(config).rotary_dim) == (1e4, 16)


@pytest.mark.parametrize(
    "config",
    [
        {**SMALL},
        {**SMALL, "rope_theta": None},
        {**SMALL, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {**SMALL, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_a_theta_that_is_nowhere_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="no rope_theta"):
        read_geometry(config)


@pytest.mark.parametrize(
    ("fields", "rotary_dim"),
    [
        ({}, 64),
        ({"head_dim": None}, 64),
        ({"head_dim": 128}, 128),
        ({"head_dim": 80, "partial_rotary_factor": 0.4}, 32),
        ({"rotary_pct": 0.25}, 16),
        ({"rotary_dim": 32}, 32),
        ({"head_dim": 128, "rotary_dim": 64, "partial_rotary_factor": 0.5}, 64),
        ({"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}}, 32),
        ({"head_dim": 192, "qk_rope_head_dim": 64}, 64),
    ],
)
def test_rotary_dimension(fields: dict[str, Any], rotary_dim: int) -> None:
    assert read_geometry({**PLAIN, **fields}).rotary_dim == rotary_dim


def yarn(**options: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", **options}


@pytest.mark.parametrize(
    ("longest", "block", "original", "native", "factor"),
    [
        pytest.param(163840, yarn(factor=40, original_max_position_embeddings=4096), 4096, 163840, 40.0, id="deepseek"),
        pytest.param(
            131072, yarn(factor=32.0, original_max_position_embeddings=4096), 4096, 131072, 32.0, id="gpt-oss"
        ),
        pytest.param(32768, yarn(factor=4.0, original_max_position_embeddings=32768), 32768, 131072, 4.0, id="qwen2.5"),
        pytest.param(40960, yarn(factor=4.0, original_max_position_embeddings=32768), 32768, 131072, 4.0, id="qwen3"),
        pytest.param(16384, yarn(original_max_position_embeddings=4096), 4096, 16384, 4.0, id="factor absent"),
        pytest.param(
            16384, yarn(factor=None, original_max_position_embeddings=4096), 4096, 16384, 4.0, id="factor null"
        ),
        pytest.param(
            16384, yarn(factor=2.0, original_max_position_embeddings=4096), 4096, 16384, 2.0, id="explicit factor wins"
        ),
        pytest.param(4096, yarn(factor=2.5), 4096, 10240, 2.5, id="original absent"),
        pytest.param(4096, {"type": "linear", "factor": 4}, 4096, 16384, 4.0, id="linear"),
        pytest.param(4096, {"type": "dynamic", "factor": 4.0}, 4096, 4096, 1.0, id="dynamic"),
    ],
)
def test_lengths(longest: int, block: dict[str, Any], original: int, native: int, factor: float) -> None:
    geometry = read_geometry({**PLAIN, "max_position_embeddings": longest, "rope_scaling": block})
    assert (geometry.original_length, geometry.native_length, geometry.factor) == (original, native, factor)
    assert geometry.is_scaled == (block.get("type") != "dynamic")


def test_a_plan_is_scaled_by_a_factor_or_by_an_original_length_of_its_own() -> None:
    def is_scaled(factor: float, native_length: int) -> bool:
        return RopeGeometry(64, 1e5, original_length=4096, native_length=native_length, factor=factor).is_scaled

    assert is_scaled(2.0, 4096)
    assert is_scaled(1.0, 8192)
    assert not is_scaled(1.0, 4096)


def test_an_original_length_beside_the_block() -> None:
    config = {**PLAIN, "original_max_position_embeddings": 2048, "rope_scaling": yarn()}
    assert (read_geometry(config).original_length, read_geometry(config).factor) == (2048, 4.0)


def test_an_unscaled_model_ignores_an_original_length() -> None:
    config = {**PLAIN, "original_max_position_embeddings": 4096}
    assert read_geometry(config) == read_geometry(PLAIN)


def test_options_are_those_of_the_scheme_alone() -> None:
    block = yarn(factor=4.0, rope_theta=1e5, truncate=False, beta_fast=16, original_max_position_embeddings=2048)
    geometry = read_geometry({**SMALL, "rope_parameters": block})
    assert geometry.parameters == {"truncate": False, "beta_fast": 16}
    assert geometry.options("yarn") == geometry.parameters
    assert geometry.options("linear") == {}


def test_a_dynamic_models_own_factor_shapes_its_longer_plans() -> None:
    geometry = read_geometry({**PLAIN, "rope_scaling": {"type": "dynamic", "factor": 3.0}})
    plan = make_plan(geometry, "dynamic", 2.0, 16384)
    unscaled = make_plan(geometry, "default", 1.0, 8192)
    assert unscaled.inv_freq[-1] / plan.inv_freq[-1] == pytest.approx(3.0 * 2 - 2)


SHORT, LONG = [1.0, 1.05, *[1.1] * 46], [1.5, 2.0, *[64.0] * 46]
TABLES = {"short_factor": SHORT, "long_factor": LONG}
PHI = {
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


def longrope(**fields: Any) -> RopeGeometry:
    """Phi's geometry with a block of these fields."""
    return read_geometry({**PHI, "rope_scaling": {"type": "longrope", **TABLES, **fields}})


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({**PHI, "rope_scaling": {"type": "longrope", **TABLES}}, id="phi-3.5"),
        pytest.param({**PHI, "rope_scaling": {"type": "su", **TABLES}}, id="phi-3"),
        pytest.param({**PHI, "rope_scaling": {"type": "yarn", **TABLES}}, id="early phi-3 code"),
        pytest.param(
            {
                **PHI,
                "num_attention_heads": 24,
                "partial_rotary_factor": 0.75,
                "rope_scaling": {"type": "longrope", **TABLES},
            },
            id="phi-4-mini",
        ),
        pytest.param(
            {**PHI, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **TABLES}}, id="version 5"
        ),
        pytest.param(
            {
                **PHI,
                "original_max_position_embeddings": None,
                "rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **TABLES},
            },
            id="original inside",
        ),
    ],
)
def test_longrope_in_every_spelling(config: dict[str, Any]) -> None:
    geometry = read_geometry(config)
    assert (geometry.scheme, geometry.rotary_dim) == ("longrope", 96)
    assert (geometry.original_length, geometry.native_length, geometry.trained_length) == (4096, 4096, 131072)
    assert (geometry.factor, geometry.is_scaled) == (32.0, True)
    assert geometry.parameters == {"short_factor": tuple(SHORT), "long_factor": tuple(LONG)}


def test_longrope_is_native_in_its_short_table_up_to_the_original_length_and_long_beyond() -> None:
    geometry = longrope()
    unscaled = make_plan(geometry, "default", 1.0, 4096)
    for length, table in [(4096, SHORT), (4097, LONG), (131072, LONG)]:
        plan = make_plan(geometry, "longrope", geometry.factor, length)
        slowdowns = [before / after for before, after in zip(unscaled.inv_freq, plan.inv_freq, strict=True)]
        assert slowdowns == pytest.approx(table)
        assert plan.attention_factor == pytest.approx(1.190238071423778)


@pytest.mark.parametrize(
    ("block", "longest", "factor", "options"),
    [
        pytest.param({"factor": 64.0}, 262144, 64.0, {"factor": 64.0}, id="factor beyond the maximum"),
        pytest.param({"factor": 8}, 131072, 32.0, {"factor": 8.0}, id="factor below the maximum"),
        pytest.param(
            {"factor": None, "attention_factor": 1.5}, 131072, 32.0, {"attention_factor": 1.5}, id="no factor"
        ),
    ],
)
def test_longrope_covers_whichever_is_longer(
    block: dict[str, Any], longest: int, factor: float, options: dict[str, float]
) -> None:
    geometry = longrope(**block)
    assert (geometry.trained_length, geometry.factor, geometry.native_length) == (longest, factor, 4096)
    assert {name: value for name, value in geometry.parameters.items() if name not in TABLES} == options


def test_longrope_is_scaled_even_where_nothing_is_stretched() -> None:
    """MiniCPM4's short table differs from 1: no other scheme may start from the unscaled frequencies."""
    geometry = read_geometry({**PHI, "max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", **TABLES}})
    assert (geometry.factor, geometry.trained_length, geometry.is_scaled) == (1.0, 4096, True)


@pytest.mark.parametrize("longest", [4097, 5000, 99_991, 131_071])
def test_the_trained_length_of_longrope_is_exact(longest: int) -> None:
    for original in (2, 3, 7, 1000, 4093, 4096):
        config = {**PHI, "max_position_embeddings": longest, "original_max_position_embeddings": original}
        geometry = read_geometry({**config, "rope_scaling": {"type": "longrope", **TABLES}})
        assert geometry.trained_length == longest


def test_the_trained_length_of_other_schemes_is_the_native_one() -> None:
    block = yarn(factor=2.0, original_max_position_embeddings=4096)
    geometry = read_geometry({**PLAIN, "max_position_embeddings": 16384, "rope_scaling": block})
    assert geometry.trained_length == geometry.native_length == 16384
    assert read_geometry(PLAIN).trained_length == 8192


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"short_factor": None}, "needs short_factor with a number for each of 48 pairs, it is None"),
        ({"long_factor": None}, "needs long_factor"),
        ({"long_factor": [1.0] * 47}, "needs long_factor with a number for each of 48 pairs, it is 47 values"),
        ({"short_factor": 4.0}, "needs short_factor"),
        ({"short_factor": ["1.0"] * 48}, "a value of short_factor must be a number"),
        ({"short_factor": [float("nan")] * 48}, "a value of short_factor must be a number"),
        ({"long_factor": [0.0] * 48}, "long_factor must hold numbers above 0"),
        ({"long_factor": [-1.0] * 48}, "a value of long_factor must be at least 0"),
        ({"short_mscale": 1.25, "long_mscale": 1.25}, "with short_mscale and long_mscale is not supported"),
        ({"attention_factor": "1.2"}, "attention_factor must be a number"),
        ({"factor": 0.5}, "factor must be at least 1"),
    ],
)
def test_unsound_longrope_blocks_are_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        longrope(**block)


@pytest.mark.parametrize(("original", "message"), [(1, "at least 2"), (262144, "factor must be at least 1")])
def test_longrope_needs_a_sound_original_length(original: int, message: str) -> None:
    config = {**PHI, "original_max_position_embeddings": original}
    with pytest.raises(UnsupportedModelError, match=message):
        read_geometry({**config, "rope_scaling": {"type": "longrope", **TABLES}})


def test_a_geometry_can_be_a_key() -> None:
    config = {**PLAIN, "rope_scaling": yarn(factor=2.0, beta_fast=16)}
    assert len({read_geometry(config), read_geometry(config), read_geometry(PLAIN)}) == 2


@pytest.mark.parametrize("scheme", ["mrope", "SU", 7, ["yarn"]])
def test_an_unknown_scheme_is_refused_by_name_with_those_known(scheme: object) -> None:
    config = {**PLAIN, "rope_scaling": {"rope_type": scheme, "type": scheme, "factor": 2.0}}
    with pytest.raises(UnsupportedModelError) as refusal:
        read_geometry(config)
    assert repr(scheme) in str(refusal.value)
    assert all(known in str(refusal.value) for known in SCHEMES)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}}, "full_attention"),
        ({"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
        ({"global_rope_theta": 1e5, "local_rope_theta": 1e4}, "local_rope_theta, global_rope_theta"),
    ],
)
def test_parameters_per_layer_type_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"per layer type .*{named}"):
        read_geometry({**PLAIN, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_position_embeddings": None}, "no max_position_embeddings"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1"),
        ({"max_position_embeddings": "8192"}, "max_position_embeddings must be a number"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"head_dim": 63}, "even and at least 4, it is 63"),
        ({"head_dim": 2}, "even and at least 4, it is 2"),
        ({"partial_rotary_factor": 1.5}, "at most 1"),
        ({"rope_theta": 1}, "above 1"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number"),
        ({"rope_theta": True}, "rope_theta must be a number"),
        ({"rope_scaling": yarn()}, "needs a factor or original_max_position_embeddings"),
        ({"rope_scaling": yarn(factor=0.5)}, "factor must be at least 1"),
        ({"rope_scaling": yarn(original_max_position_embeddings=16384)}, "factor must be at least 1"),
        ({"rope_scaling": {"type": "dynamic"}}, "no factor"),
        ({"rope_scaling": "yarn"}, "must be an object"),
    ],
)
def test_unsound_configs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_geometry({**PLAIN, **fields})
