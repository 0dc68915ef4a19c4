"""The configs of published models are read as their makers meant them."""

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model_patches.geometry import LocalRope
from model_patches.rope_config import read_geometry
from model_patches.rope_families import DEFAULTS, FIXED_THETA, INTERLEAVED, LOCAL_UNSCALED, layout
from service.scaling.policy import Policy
from tests.model_patches.families import FAMILIES, Family, with_stand_in_weights

DIM = 8
HALF = {(pair, pair + DIM // 2) for pair in range(DIM // 2)}
NEIGHBOURS = {(2 * pair, 2 * pair + 1) for pair in range(DIM // 2)}


def named(families: tuple[Family, ...]) -> list[Any]:
    return [pytest.param(family, id=family.name) for family in families]


@pytest.mark.parametrize("family", named(FAMILIES))
def test_the_geometry_of_a_published_config(family: Family) -> None:
    geometry, expected = read_geometry(family.config), family.expected
    assert (geometry.rotary_dim, geometry.theta) == (expected.rotary_dim, expected.theta)
    assert (geometry.original_length, geometry.native_length) == (expected.original, expected.native)
    assert (geometry.scheme, geometry.factor) == (expected.scheme, expected.factor)
    assert geometry.trained_length == expected.trained
    assert geometry.layout == expected.layout
    local = None if expected.local is None else LocalRope(("sliding_attention",), *expected.local)
    assert geometry.local == local


@pytest.mark.parametrize("family", named(FAMILIES))
def test_what_is_served_of_a_published_model_where_nothing_is_configured(family: Family) -> None:
    policy, expected = Policy(with_stand_in_weights(read_geometry(family.config))), family.expected
    assert (policy.native_length, policy.max_length) == (expected.native, expected.longest)
    assert expected.ladder in (None, policy.ladder)


@pytest.mark.parametrize("family", named(FAMILIES))
def test_transformers_reads_the_same_base_from_a_published_config(family: Family) -> None:
    config = copy.deepcopy(dict(family.config))  # transformers writes into it
    if config["model_type"] == "kimi_k2" or family.expected.scheme == "clex":
        pytest.skip("transformers has no such model")
    if (block := config.get("rope_scaling")) and block.get("type") == "su":
        block["type"] = "longrope"  # transformers knows the old name, but misses the original length with it
    read = AutoConfig.for_model(**config)
    read = getattr(read, "text_config", read)
    nested = read.rope_parameters.get("full_attention", read.rope_parameters)
    assert nested["rope_theta"] == family.expected.theta
    if local := read.rope_parameters.get("sliding_attention"):
        assert family.expected.local is not None
        assert local["rope_theta"] == family.expected.local[0]
    else:
        assert family.expected.local is None


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_what_a_type_leaves_out_is_what_transformers_takes(model_type: str) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    parameters: Mapping[str, Any] = config["rope_parameters"]
    whole = parameters.get("full_attention", parameters)
    where = {
        "rope_theta": whole.get("rope_theta"),
        "partial_rotary_factor": whole.get("partial_rotary_factor"),
        "rotary_pct": whole.get("partial_rotary_factor"),
        "rope_local_base_freq": parameters.get("sliding_attention", {}).get("rope_theta"),
        "original_max_position_embeddings": 32768,  # in no code: from the model's report
    }
    assert DEFAULTS[model_type] == {name: where.get(name, config.get(name)) for name in DEFAULTS[model_type]}


@pytest.mark.parametrize("model_type", FIXED_THETA)
def test_the_base_of_configs_that_are_older_than_its_field_is_what_transformers_takes(model_type: str) -> None:
    assert AutoConfig.for_model(model_type).rope_parameters["rope_theta"] == FIXED_THETA[model_type]


@pytest.mark.parametrize("model_type", LOCAL_UNSCALED)
def test_types_whose_windowed_layers_are_not_scaled_though_their_base_is_the_same(model_type: str) -> None:
    block = {"rope_type": "linear", "factor": 8.0}
    parameters = AutoConfig.for_model(model_type, rope_theta=5e5, rope_scaling=block).rope_parameters
    assert parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    assert parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e5}


# What transformers rotates keys with, in the module of each model type; mostly the first.
ROTATIONS = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb", "apply_rotary_emb")
UNLISTED = (
    *("deepseek_v3", "falcon", "gemma2", "gemma3_text", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "llama"),
    *("ministral", "mistral", "mixtral", "modernbert", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)


def rotate_keys(model_type: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The rotation of keys [1, 1, 1, d] in a model of this type by `of_dims`, an angle for each dimension [1, 1, d]."""
    package = model_type_to_module_name(model_type)
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    apply = next(getattr(module, name) for name in ROTATIONS if hasattr(module, name))

    def rotate(keys: torch.Tensor, of_dims: torch.Tensor) -> Any:
        of_pairs = of_dims[..., : DIM // 2]
        if apply.__name__ == "apply_rotary_emb":
            return apply(keys, keys, torch.polar(torch.ones_like(of_pairs), of_pairs))[1]
        if package in ("codegen", "gptj"):
            return apply(keys, of_pairs.sin(), of_pairs.cos())
        if package == "gpt_oss":
            return apply(keys, keys, of_pairs.cos(), of_pairs.sin())[1]
        return apply(keys, keys, of_dims.cos(), of_dims.sin())[1]

    return rotate


def pairs_of(model_type: str) -> set[tuple[int, ...]]:
    """The dimensions of a cached key that are rotated together."""
    angles = torch.arange(1.0, DIM + 1).view(1, 1, DIM) / 10
    rotate = rotate_keys(model_type)
    # rotated[i, o]: what input dimension i puts into output dimension o. Those rotated together share their inputs.
    rotated = torch.stack([rotate(unit.view(1, 1, 1, DIM), angles).flatten() for unit in torch.eye(DIM)])
    reached = (rotated.abs() > 1e-6).float()
    together = (reached.T @ reached) > 0
    return {tuple(torch.nonzero(row).flatten().tolist()) for row in together}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("model_type", [*sorted(INTERLEAVED), *UNLISTED])
def test_the_layout_is_that_of_the_keys_which_the_model_caches(model_type: str) -> None:
    assert pairs_of(model_type) == (NEIGHBOURS if layout({"model_type": model_type}) == "interleaved" else HALF)


# Their rotary parameters are in configs of their parts: a llama4_text, which is listed; several, which is refused.
OF_PARTS = frozenset({"blt", "llama4"})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_no_causal_model_of_transformers_with_interleaved_keys_is_missing() -> None:
    probed, missing = 0, set()
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            pairs = pairs_of(model_type)
        except (ImportError, StopIteration, TypeError, ValueError, RuntimeError):  # no such seam, or another signature
            continue
        probed += 1
        if pairs == NEIGHBOURS and layout({"model_type": model_type}) == "half":
            missing.add(model_type)
    assert probed > 100
    assert missing <= OF_PARTS
