"""Every config shape met in the wild is read, and what cannot be served is refused by name."""

from typing import Any, Literal

import pytest

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import LocalRope, RopeGeometry
from model_patches.plan import make_plan
from model_patches.rope_config import read_geometry
from model_patches.schemes import known_schemes

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


@pytest.mark.parametrize("scheme", ["axial", "SU", 7, ["yarn"]])
def test_an_unknown_scheme_is_refused_by_name_with_those_known(scheme: object) -> None:
    config = {**PLAIN, "rope_scaling": {"rope_type": scheme, "type": scheme, "factor": 2.0}}
    with pytest.raises(UnsupportedModelError) as refusal:
        read_geometry(config)
    assert repr(scheme) in str(refusal.value)
    assert all(known in str(refusal.value) for known in known_schemes())


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "'mrope' is not supported: it rotates by time, height"),
        ({"rope_type": "default", "mrope_section": [24, 20, 20]}, "'mrope' is not supported"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.25}, "'proportional' is not supported: it leaves"),
    ],
)
def test_schemes_that_need_more_than_frequencies_are_refused_with_the_reason(
    block: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_geometry({**PLAIN, "rope_scaling": block})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alibi": True}, "alibi is true"),
        ({"layer_rope_theta": [1e4, 0]}, "layer_rope_theta is not supported"),
        ({"model_type": "nanochat"}, "'nanochat' is not supported: it rotates backwards"),
        ({"rope_theta": [1e4, 1e6]}, "rope_theta must be a number"),
    ],
)
def test_other_ways_to_place_tokens_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_geometry({**PLAIN, **fields})


WHOLE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"rope_parameters": {"full_attention": WHOLE, "sliding_attention": LOCAL}}, id="version 5"),
        pytest.param({"rope_parameters": {"sliding_attention": LOCAL, "full_attention": WHOLE}}, id="in any order"),
        pytest.param({"rope_scaling": {"full_attention": WHOLE, "sliding_attention": LOCAL}}, id="under the old name"),
        pytest.param(
            {
                "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": LOCAL},
                "rope_scaling": {"type": "linear", "factor": 8.0},
            },
            id="with a block of version 4",
        ),
        pytest.param(
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_parameters": {
                    "full_attention": {"type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            id="bases outside",
        ),
        pytest.param(
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            id="version 4, Gemma",
        ),
        pytest.param(
            {
                "global_rope_theta": 1e6,
                "local_rope_theta": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            id="version 4, ModernBERT's names",
        ),
        pytest.param({"rope_theta": 1e6, "swa_rope_theta": 1e4, "rope_scaling": WHOLE}, id="MiMo's name"),
    ],
)
def test_scaling_is_of_the_layers_that_see_everything(fields: dict[str, Any]) -> None:
    geometry = read_geometry({**SMALL, **fields})
    assert (geometry.scheme, geometry.factor, geometry.theta) == ("linear", 8.0, 1e6)
    assert geometry.local == LocalRope(("sliding_attention",), 1e4, 64)


def test_layers_may_rotate_different_shares() -> None:
    whole = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    windowed = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    geometry = read_geometry(
        {**SMALL, "rope_parameters": {"full_attention": whole, "chunked_attention": windowed}},
    )
    assert (geometry.rotary_dim, geometry.theta) == (32, 5e5)
    assert geometry.local == LocalRope(("chunked_attention",), 1e4, 64)
    spelled = read_geometry(
        {**SMALL, "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, "local_rope_theta": 1e4}
    )
    assert spelled.local == LocalRope(("sliding_attention",), 1e4, 32)


def test_a_null_stands_for_layers_without_rotation() -> None:
    geometry = read_geometry({**SMALL, "rope_parameters": {"full_attention": WHOLE, "sliding_attention": None}})
    assert (geometry.scheme, geometry.local) == ("linear", None)
    alike = {"full_attention": WHOLE, "linear_attention": None, "indexed_attention": {**WHOLE}}
    assert read_geometry({**SMALL, "rope_parameters": alike}) == geometry


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_parameters": {"full_attention": None, "sliding_attention": LOCAL}},
            r"only layers that see a window are rotated \(sliding_attention\)",
        ),
        ({"rope_parameters": {"main": WHOLE, "compress": LOCAL}}, "differ between main, compress"),
        (
            {"rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL, "chunked_attention": WHOLE}},
            "differ between sliding_attention, chunked_attention",
        ),
        (
            {"rope_parameters": {"full_attention": WHOLE, "sliding_attention": WHOLE}},
            r"'linear' on layers that see a window \(sliding_attention\)",
        ),
        ({"rope_parameters": {"full_attention": WHOLE, "rope_theta": 1e4}}, "have rope_theta beside them"),
        (
            {"model_type": "modernbert", "local_rope_theta": 1e4, "rope_theta": 1e5, "rope_scaling": WHOLE},
            "'linear' on layers that see a window",
        ),
        (
            {"rope_parameters": {"full_attention": WHOLE, "sliding_attention": {"rope_type": "default"}}},
            "no rope_theta",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional"}, "sliding_attention": LOCAL}},
            "'proportional' is not supported",
        ),
    ],
)
def test_layers_that_cannot_be_told_apart_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_geometry({**SMALL, **fields})


def test_a_text_config_is_read_where_only_that_has_rotary_parameters() -> None:
    text = {**PLAIN, "model_type": "cohere"}
    assert read_geometry({"model_type": "vision", "hidden_size": 1, "text_config": text}) == read_geometry(text)
    assert read_geometry({"model_type": "cohere", "text_config": PLAIN}) == read_geometry(text)
    assert read_geometry({**PLAIN, "text_config": {"rope_theta": 7.0}}) == read_geometry(PLAIN)


@pytest.mark.parametrize(
    ("model_type", "version", "theta"),
    [
        ("llama", "4.31.0.dev0", 1e4),
        ("llama", "4.32.1", 1e4),
        ("falcon", "4.27.4", 1e4),
        ("llama", "4.33.0", None),
        ("llama", "5.0.0", None),
        ("llama", None, None),
        ("mistral", "4.31.0", None),
    ],
)
def test_a_config_older_than_the_field_has_the_base_of_its_time(
    model_type: str, version: str | None, theta: float | None
) -> None:
    config = {**SMALL, "model_type": model_type, "transformers_version": version}
    assert read_geometry({**config, "rope_theta": 5e5}).theta == 5e5
    if theta is None:
        with pytest.raises(UnsupportedModelError, match="no rope_theta"):
            read_geometry(config)
    else:
        assert read_geometry(config).theta == theta


def test_what_a_type_leaves_out_yields_to_what_a_config_says() -> None:
    assert read_geometry({**PLAIN, "model_type": "glm4"}).rotary_dim == 32
    assert read_geometry({**PLAIN, "model_type": "glm4", "partial_rotary_factor": 1.0}).rotary_dim == 64
    assert read_geometry({**PLAIN, "model_type": "gpt_neox"}).rotary_dim == 16
    assert read_geometry({**PLAIN, "model_type": "gpt_neox", "rotary_pct": 0.5}).rotary_dim == 32


def test_the_maximum_of_gemma_3_includes_its_factor() -> None:
    config = {**PLAIN, "model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}}
    geometry = read_geometry({**config, "max_position_embeddings": 131072})
    assert (geometry.original_length, geometry.native_length, geometry.factor) == (32768, 131072, 8.0)
    assert read_geometry(config).original_length == read_geometry(config).native_length == 8192


@pytest.mark.parametrize(
    ("model_type", "stated", "native"), [("cohere", 131072, 131072), ("cohere", 4096, 8192), ("llama", 131072, 8192)]
)
def test_cohere_states_what_it_trained_beside_the_maximum(model_type: str, stated: int, native: int) -> None:
    geometry = read_geometry({**PLAIN, "model_type": model_type, "model_max_length": stated})
    assert geometry.native_length == geometry.original_length == native


def test_dynamic_yarn_is_unscaled_up_to_the_original_length() -> None:
    block = {"type": "dynamic-yarn", "original_max_position_embeddings": 4096}
    geometry = read_geometry({**PLAIN, "rope_scaling": block})
    assert (geometry.scheme, geometry.original_length, geometry.native_length) == ("dynamic-yarn", 4096, 4096)
    assert not geometry.is_scaled


CLEX = {"type": "clex", "max_factor": 16, "param_factor": 1, "act": "silu", "factor": 1}


def test_clex_reaches_as_many_original_lengths_as_it_was_trained_for() -> None:
    geometry = read_geometry({**PLAIN, "rope_scaling": CLEX})
    assert (geometry.scheme, geometry.factor, geometry.is_scaled) == ("clex", 16.0, True)
    assert (geometry.original_length, geometry.native_length, geometry.trained_length) == (8192, 8192, 131072)
    assert geometry.options("clex") == {"max_factor": 16, "param_factor": 1, "act": "silu"}
    assert read_geometry({**PLAIN, "rope_scaling": {**CLEX, "max_factor": 1}}).is_scaled


@pytest.mark.parametrize(
    ("max_factor", "message"), [(None, "no max_factor"), (0.5, "max_factor must be at least 1, it is 0.5")]
)
def test_clex_needs_a_sound_max_factor(max_factor: float | None, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_geometry({**PLAIN, "rope_scaling": {**CLEX, "max_factor": max_factor}})


CARD = yarn(factor=4.0, original_max_position_embeddings=4096, beta_fast=16)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"])
def test_a_yarn_block_on_qwen_is_a_ceiling(model_type: str) -> None:
    config = {**PLAIN, "partial_rotary_factor": 1.0, "model_type": model_type, "rope_scaling": CARD}
    geometry = read_geometry(config)
    assert (geometry.scheme, geometry.factor, geometry.is_scaled) == ("default", 1.0, False)
    assert (geometry.original_length, geometry.native_length, geometry.trained_length) == (4096, 4096, 16384)
    assert geometry.options("yarn") == {"beta_fast": 16}
    assert read_geometry(config, "unscaled") == geometry
    kept = read_geometry(config, "config")
    assert (kept.scheme, kept.factor, kept.native_length, kept.trained_length) == ("yarn", 4.0, 16384, 16384)


@pytest.mark.parametrize(
    ("model_type", "block"),
    [
        ("qwen2", {"type": "linear", "factor": 4.0}),
        ("gpt_oss", CARD),
        ("deepseek_v3", CARD),
        ("llama", CARD),
        (None, CARD),
    ],
)
def test_every_other_block_is_the_models_own_plan_unless_the_operator_says_otherwise(
    model_type: str | None, block: dict[str, Any]
) -> None:
    config = {**PLAIN, "model_type": model_type, "rope_scaling": block}
    geometry = read_geometry(config)
    assert geometry.is_scaled
    assert read_geometry(config, "config") == geometry
    unscaled = read_geometry(config, "unscaled")
    assert (unscaled.scheme, unscaled.factor, unscaled.is_scaled) == ("default", 1.0, False)
    assert unscaled.native_length == geometry.original_length
    assert unscaled.trained_length == geometry.trained_length
    assert unscaled.options(geometry.scheme) == geometry.parameters


@pytest.mark.parametrize("block", [None, {"type": "dynamic", "factor": 2.0}])
@pytest.mark.parametrize("native_rope", [None, "config", "unscaled"])
def test_without_scaling_there_is_nothing_to_decide(
    native_rope: Literal["config", "unscaled"] | None, block: dict[str, Any] | None
) -> None:
    config = {**PLAIN, "model_type": "qwen3", "rope_scaling": block}
    assert read_geometry(config, native_rope) == read_geometry(config)
    assert read_geometry(config).ceiling is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**PHI, "rope_scaling": {"type": "longrope", **TABLES}}, "'longrope' has tables of its own"),
        ({**PLAIN, "rope_scaling": CLEX}, "'clex' has tables of its own"),
        ({**PLAIN, "rope_scaling": {**CARD, "mscale": 1.0, "mscale_all_dim": 1.0}}, "mscale_all_dim builds"),
    ],
)
def test_a_plan_that_the_model_is_built_around_cannot_be_taken_off(fields: dict[str, Any], message: str) -> None:
    assert read_geometry(fields).is_scaled
    with pytest.raises(UnsupportedModelError, match=f"native_rope 'unscaled' does not go with this model: .*{message}"):
        read_geometry(fields, "unscaled")


def test_a_falsy_mscale_all_dim_binds_nothing() -> None:
    block = {**CARD, "mscale": 1.0, "mscale_all_dim": 0}
    assert not read_geometry({**PLAIN, "rope_scaling": block}, "unscaled").is_scaled


@pytest.mark.parametrize(
    "options",
    [
        {"attention_factor": 1.25},
        {"mscale": 1.0, "mscale_all_dim": 0.707},
        {"truncate": False},
        {"beta_fast": 16.0, "beta_slow": 2.0},
    ],
)
def test_what_a_block_states_shapes_its_plan(options: dict[str, Any]) -> None:
    def plan(**stated: Any) -> Any:
        block = yarn(factor=4.0, original_max_position_embeddings=2048, finetuned=True, **stated)
        geometry = read_geometry({**PLAIN, "rope_scaling": block})
        assert geometry.parameters == stated
        return make_plan(geometry, "yarn", 4.0, 8192)

    assert plan(**options) != plan()


@pytest.mark.parametrize(("model_type", "layout"), [("cohere", "interleaved"), ("llama", "half"), (None, "half")])
def test_the_layout_is_of_the_model_type(model_type: str | None, layout: str) -> None:
    assert read_geometry({**PLAIN, "model_type": model_type}).layout == layout


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
