"""Which plans are compared."""

from typing import Any

import pytest
from transformers import LlamaConfig, Phi3Config, PreTrainedConfig

from model_patches.geometry import RopeGeometry
from model_patches.plan import make_plan
from model_patches.rope_config import read_geometry
from service.evaluation.errors import EvaluationError
from service.evaluation.schemes import SchemeAsked, check_schemes, choose, growing, native_plan, parse_schemes
from service.scaling.options import NativeRope
from service.scaling.policy import Policy

GEOMETRY = RopeGeometry(rotary_dim=8, theta=10000.0, original_length=64, native_length=64)
POLICY = Policy(GEOMETRY)


def test_schemes_are_read_once_each_in_their_order() -> None:
    assert parse_schemes("default, yarn:2,ntk,yarn:2.0,policy") == (
        SchemeAsked("default"),
        SchemeAsked("yarn", 2.0),
        SchemeAsked("ntk"),
        SchemeAsked("policy"),
    )
    assert [str(scheme) for scheme in parse_schemes("ntk,yarn:2.5")] == ["ntk", "yarn:2.5"]


@pytest.mark.parametrize("text", ["yarn:", "yarn:two", "yarn:0.5", "yarn:nan", "yarn:inf", "policy:2", "default:2"])
def test_what_is_no_scheme_is_refused(text: str) -> None:
    with pytest.raises(EvaluationError, match=f"--schemes: '{text}'"):
        parse_schemes(text)


def test_what_the_model_cannot_run_is_refused() -> None:
    check_schemes(parse_schemes("default,policy,yarn:2"), POLICY)
    with pytest.raises(EvaluationError, match="yarm is not for this model: known are policy, default, dynamic"):
        check_schemes(parse_schemes("yarm"), POLICY)
    with pytest.raises(EvaluationError, match="longrope"):
        check_schemes(parse_schemes("longrope"), POLICY)
    scaled = RopeGeometry(8, 10000.0, original_length=64, native_length=128, scheme="yarn", factor=2.0)
    check_schemes(parse_schemes("default,yarn,policy"), Policy(scaled))
    with pytest.raises(EvaluationError, match="the model's own plan is scaled already"):
        check_schemes(parse_schemes("yarn:2"), Policy(scaled))


@pytest.mark.parametrize(
    ("asked", "length", "scheme", "factor", "computed_for"),
    [
        ("default", 32, "default", 1.0, 64),
        ("default", 500, "default", 1.0, 64),
        ("yarn", 64, "default", 1.0, 64),
        ("yarn", 96, "yarn", 1.5, 96),
        ("dynamic", 100, "dynamic", 1.5625, 100),
        ("yarn:2", 32, "yarn", 2.0, 128),
        ("yarn:2", 200, "yarn", 2.0, 128),
        ("dynamic:2", 32, "dynamic", 2.0, 128),
        ("policy", 64, "default", 1.0, 64),
        ("policy", 66, "yarn", 1.25, 80),
        ("policy", 96, "yarn", 1.5, 96),
        ("policy", 97, "yarn", 2.0, 128),
        ("policy", 256, "yarn", 4.0, 256),
    ],
)
def test_each_gives_a_length_its_plan(asked: str, length: int, scheme: str, factor: float, computed_for: int) -> None:
    [parsed] = parse_schemes(asked)
    choice = choose(parsed, POLICY, length)
    assert choice is not None
    assert (choice.plan.scheme, choice.plan.factor) == (scheme, factor)
    assert choice.plan == make_plan(GEOMETRY, scheme, factor, computed_for)
    assert choice.plan.max_length >= length


def test_the_policy_serves_no_length_beyond_its_own() -> None:
    assert choose(SchemeAsked("policy"), POLICY, 257) is None
    assert choose(SchemeAsked("default"), POLICY, 257) is not None


def test_a_fixed_plan_never_grows_and_the_ladder_does() -> None:
    choice = choose(SchemeAsked("yarn", 2.0), POLICY, 32)
    assert choice is not None
    assert (len(choice.rungs), choice.growth) == (1, "stop")
    path = growing(POLICY, "reprefill", 10)
    assert [plan.max_length for plan in path.rungs] == [64, 80, 96, 128, 160, 192, 256]
    assert path.growth == "reprefill"


LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 2.0, 3.5, 4.5]},
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SHAPE: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "max_position_embeddings": 256, "pad_token_id": 0}
PHI3 = Phi3Config(**SHAPE, rope_parameters=LONGROPE, original_max_position_embeddings=64)
LLAMA = LlamaConfig(**SHAPE, rope_parameters=YARN)


@pytest.mark.parametrize(("config", "native_rope"), [(PHI3, "config"), (LLAMA, "config"), (LLAMA, "unscaled")])
def test_the_native_plan_is_that_of_a_short_request(config: PreTrainedConfig, native_rope: NativeRope) -> None:
    policy = Policy(read_geometry(config.to_dict(), native_rope))
    assert native_plan(policy) == policy.choose(8, 4).plan


def test_plans_that_rotate_alike_have_one_name() -> None:
    one = make_plan(GEOMETRY, "ntk", 2.0, 128)
    assert one.fingerprint == make_plan(GEOMETRY, "dynamic", 1.0, 128).fingerprint
    names = {make_plan(GEOMETRY, "yarn", factor, 128).fingerprint for factor in (1.5, 2.0, 2.0000001)}
    assert len(names | {one.fingerprint}) == 4
