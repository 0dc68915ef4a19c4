"""The ladder: which factors there are, how far they reach, and which options do not go with a model."""

import re
from dataclasses import replace
from typing import Any

import pytest

from model_patches.geometry import RopeGeometry
from model_patches.rope_config import read_geometry
from service.errors import StartupError
from service.scaling.ladder import Rung, build_ladder
from service.scaling.options import OptionError, RopePolicy
from service.scaling.policy import Policy, RopeWish

GEOMETRY = RopeGeometry(rotary_dim=64, theta=1e5, original_length=1000, native_length=1000)
SCALED = RopeGeometry(
    rotary_dim=64, theta=1.5e5, original_length=4096, native_length=131072, scheme="yarn", factor=32.0
)
CEILING = replace(SCALED, original_length=1000, native_length=4000, factor=4.0, parameters={"beta_fast": 16}).unscaled()
QWEN_WITH_YARN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}


def rungs(geometry: RopeGeometry, **options: Any) -> list[tuple[float, str, int]]:
    return [(rung.factor, rung.scheme, rung.covers) for rung in Policy(geometry, **options).rungs]


@pytest.mark.parametrize(
    ("native", "longest", "ladder"),
    [
        (8192, 32768, (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)),
        (1000, 2333, (1.0, 1.25, 1.5, 2.0, 2.333)),
        (1000, 10000, (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)),
        (1000, 1250, (1.0, 1.25)),
        (1000, 1001, (1.0, 1.001)),
        (1000, 1000, (1.0,)),
        (1000, 10, (1.0,)),
        (3, 4, (1.0, 4 / 3)),  # factor 1.25 covers no token more
    ],
)
def test_the_default_ladder(native: int, longest: int, ladder: tuple[float, ...]) -> None:
    policy = Policy(GEOMETRY, native_length=native, max_length=longest)
    assert policy.ladder == ladder
    assert policy.max_length == longest


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"ladder": [2, 4]}, [(2, "yarn", 2000), (4, "yarn", 4000)], id="its top is the maximum"),
        pytest.param({"ladder": "1.5, 2.3339"}, [(1.5, "yarn", 1500), (2.3339, "yarn", 2333)], id="a top as written"),
        pytest.param(
            {"ladder": [1.5, {"factor": 2, "scheme": "ntk"}], "scheme": "linear"},
            [(1.5, "linear", 1500), (2, "ntk", 2000)],
            id="schemes of their own",
        ),
        pytest.param(
            {"ladder": [2, {"factor": 4, "scheme": "ntk"}, 8], "max_length": 3000},
            [(2, "yarn", 2000), (3, "ntk", 3000)],
            id="cut, and the exact ratio on top",
        ),
        pytest.param({"ladder": [2, 4], "max_length": 2000}, [(2, "yarn", 2000)], id="cut at a rung"),
        pytest.param({"ladder": [2, 4], "max_length": 4000}, [(2, "yarn", 2000), (4, "yarn", 4000)], id="just reached"),
        pytest.param({"ladder": [2], "native_length": 500}, [(2, "yarn", 1000)], id="of the native length set"),
        pytest.param({"ladder": [2], "max_length": 900}, [], id="a maximum below the native length"),
    ],
)
def test_a_given_ladder(options: dict[str, Any], expected: list[tuple[float, str, int]]) -> None:
    native, *above = rungs(GEOMETRY, **options)
    assert native[:2] == (1.0, "default")
    assert above == expected
    assert Policy(GEOMETRY, **options).max_length == (expected[-1][2] if expected else 900)


@pytest.mark.parametrize(
    ("trained", "longest", "factors", "top"),
    [
        (16, None, [1, 2, 3, 4, 5, 6, 8, 10, 12, 16], 16000),
        (7, None, [1, 2, 3, 4, 5, 6, 7], 7000),
        (16, 6500, [1, 2, 3, 4, 5, 6, 7], 6500),
        (16, 6000, [1, 2, 3, 4, 5, 6], 6000),
        (16, 1001, [1, 2], 1001),
        (16, 1000, [1], 1000),
        (16, 900, [1], 900),
        (1, None, [1], 1000),
    ],
)
def test_clex_has_whole_multiples_of_the_native_length(
    trained: int, longest: int | None, factors: list[int], top: int
) -> None:
    geometry = replace(GEOMETRY, scheme="clex", factor=float(trained))
    below = [Rung(factor, "clex", factor * 1000) for factor in factors[:-1]]
    ladder = build_ladder(geometry, RopePolicy(max_length=longest))
    assert ladder == (*below, Rung(factors[-1], "clex", top))


@pytest.mark.parametrize(
    ("ladder", "native", "said"),
    [
        ([1.0001, 2], 1000, "ladder: factor 1.0001 covers 1000 tokens, as factor 1 before it does"),
        ([2, 2.0001, 3], 1000, "ladder: factor 2.0001 covers 2000 tokens, as factor 2 before it does"),
        ([1.25, 1.5], 2, "ladder: factor 1.25 covers 2 tokens, as factor 1 before it does"),
    ],
)
def test_rungs_that_cover_as_much_as_the_one_before_are_refused(ladder: list[float], native: int, said: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(said)}: leave one of them out") as refusal:
        Policy(GEOMETRY, ladder=ladder, native_length=native)
    assert refusal.value.options == ("ladder", "native_length")


class TestCeiling:
    """A config's scaling block that is there for those only who need it."""

    def test_the_ladder_reaches_as_far_as_the_block_under_its_scheme_and_options(self) -> None:
        policy = Policy(CEILING)
        assert (policy.native_length, policy.max_length) == (1000, 4000)
        assert [rung.scheme for rung in policy.rungs] == ["default", *["yarn"] * 6]
        plan = policy.choose(1500, 100).plan
        assert plan != Policy(replace(CEILING, parameters={})).choose(1500, 100).plan

    def test_an_operator_may_go_beyond_it_and_choose_another_scheme(self) -> None:
        policy = Policy(CEILING, max_length=8000, scheme="ntk")
        assert (policy.max_length, policy.rungs[-1].scheme, policy.rungs[-1].factor) == (8000, "ntk", 8.0)

    @pytest.mark.parametrize(("native", "longest"), [(100, 400), (2000, 4000), (5000, 5000)])
    def test_it_comes_down_with_a_shorter_native_length(self, native: int, longest: int) -> None:
        assert Policy(CEILING, native_length=native).max_length == longest

    def test_another_configured_scheme_is_the_default_one(self) -> None:
        assert Policy(replace(CEILING, configured_scheme="linear")).rungs[1].scheme == "linear"


@pytest.mark.parametrize("native_rope", [None, "unscaled"])
def test_a_qwen_config_with_yarn_is_unscaled_up_to_its_original_length(native_rope: Any) -> None:
    policy = Policy(read_geometry(QWEN_WITH_YARN, native_rope))
    assert (policy.native_length, policy.max_length) == (32768, 131072)
    for prompt, max_tokens, mode, scheme, factor in [
        (100, 50, "native", "default", 1.0),
        (32768, 1, "dynamic", "default", 1.0),
        (32769, 1, "static", "yarn", 1.25),
        (131071, 1, "static", "yarn", 4.0),
    ]:
        choice = policy.choose(prompt, max_tokens)
        assert (choice.mode, choice.plan.scheme, choice.plan.factor) == (mode, scheme, factor)


def test_a_qwen_config_with_yarn_is_scaled_for_ever_where_the_operator_says_so() -> None:
    policy = Policy(read_geometry(QWEN_WITH_YARN, "config"))
    assert (policy.native_length, policy.max_length, policy.ladder) == (131072, 131072, (4.0,))
    assert policy.choose(100, 50, RopeWish()).plan.scheme == "yarn"


@pytest.mark.parametrize(
    ("geometry", "options", "said"),
    [
        (GEOMETRY, {"scheme": "alibi"}, "scheme must be one of dynamic, .*yarn, it is 'alibi'"),
        (GEOMETRY, {"scheme": "default"}, "scheme must be one of"),
        (GEOMETRY, {"ladder": [{"factor": 2, "scheme": "alibi"}]}, "scheme must be one of .* it is 'alibi'"),
        (GEOMETRY, {"ladder": [{"factor": 2, "scheme": "longrope"}]}, "scheme must be one of .* it is 'longrope'"),
        (GEOMETRY, {"ladder": [2], "max_length": 2001}, "2001 is above the 2000 tokens .* factor 2, .* length 1000"),
        (GEOMETRY, {"mode": [{"prompt_tokens": 1000, "mode": "native"}, {"mode": "static"}]}, "below .* 1000, .* 1000"),
        (GEOMETRY, {"mode": [{"mode": "native"}]}, "below the native length 1000, it has none"),
        (SCALED, {"native_length": 4096}, r"native length 4096 cannot be set: .*yarn, factor 32"),
        (SCALED, {"max_length": 131073}, "131073 is above the trained length 131072"),
        (SCALED, {"ladder": [2]}, r"ladder cannot be set: .*yarn, factor 32.* native_rope unscaled"),
        (SCALED, {"scheme": "ntk"}, r"scheme 'ntk' cannot be set: .*yarn, factor 32"),
        (replace(GEOMETRY, scheme="clex", factor=16.0), {"max_length": 16001}, "above the trained length 16000"),
        (replace(GEOMETRY, scheme="clex", factor=16.0), {"ladder": [2]}, "ladder cannot be set: .*clex, factor 16"),
    ],
)
def test_options_that_do_not_go_with_the_model_are_refused(
    geometry: RopeGeometry, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(StartupError, match=said):
        Policy(geometry, **options)
