"""The default policy as tables, with every edge: L is 8192, the maximum length 32768."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_patches.geometry import RopeGeometry
from model_patches.plan import make_plan
from model_patches.schemes import SCHEMES, Frequencies
from service.errors import ContextLengthError, WishError
from service.scaling.options import OptionError
from service.scaling.policy import Growth, Mode, Policy, RopeWish

GEOMETRY = RopeGeometry(rotary_dim=64, theta=1e5, original_length=8192, native_length=8192)
SCALED = RopeGeometry(
    rotary_dim=64, theta=1.5e5, original_length=4096, native_length=131072, scheme="yarn", factor=32.0
)
DYNAMIC = RopeGeometry(
    rotary_dim=64, theta=1e5, original_length=8192, native_length=8192, scheme="dynamic", parameters={"factor": 3.0}
)
LONGROPE = RopeGeometry(
    rotary_dim=6,
    theta=1e4,
    original_length=4096,
    native_length=4096,
    scheme="longrope",
    factor=32.0,
    parameters={"short_factor": (1.0, 1.1, 1.2), "long_factor": (2.0, 8.0, 32.0)},
)
POLICY = Policy(GEOMETRY)


def test_the_defaults() -> None:
    assert (POLICY.native_length, POLICY.max_length) == (8192, 32768)
    assert [POLICY.coverage(rung) for rung in POLICY.ladder] == [8192, 10240, 12288, 16384, 20480, 24576, 32768]


@settings(deadline=None)
@given(native=st.integers(min_value=2, max_value=10**6), longest=st.integers(min_value=2, max_value=10**7))
def test_rungs_rise_and_the_top_covers_exactly_the_maximum(native: int, longest: int) -> None:
    policy = Policy(GEOMETRY, native_length=native, max_length=longest)
    coverages = [policy.coverage(rung) for rung in policy.ladder]
    assert list(policy.ladder) == sorted(set(policy.ladder))
    assert coverages == sorted(coverages)
    assert coverages[-1] == longest
    assert coverages[0] == min(native, longest)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "mode", "factor", "granted", "granted_under_stop"),
    [
        pytest.param(1, 1, "native", 1.0, 1, 1, id="shortest"),
        pytest.param(100, 8092, "native", 1.0, 8092, 8092, id="exactly L together"),
        pytest.param(8191, 1, "native", 1.0, 1, 1, id="exactly L together, one to generate"),
        pytest.param(100, 8093, "dynamic", 1.0, 8093, 8092, id="L + 1 together"),
        pytest.param(8191, 2, "dynamic", 1.0, 2, 1, id="L + 1 together, prompt one short of L"),
        pytest.param(100, None, "dynamic", 1.0, 32668, 8092, id="all that remains"),
        pytest.param(100, 32668, "dynamic", 1.0, 32668, 8092, id="exactly the maximum together"),
        pytest.param(8193, 1, "static", 1.25, 1, 1, id="prompt L + 1"),
        pytest.param(8193, 2047, "static", 1.25, 2047, 2047, id="fills the rung with the reserve just not reached"),
        pytest.param(8193, None, "static", 1.5, 24575, 4095, id="the reserve exceeds the rung by one"),
        pytest.param(12000, 200, "static", 1.5, 200, 200, id="max_tokens below the reserve"),
        pytest.param(12000, 15000, "static", 2.0, 15000, 4384, id="max_tokens above the reserve"),
        pytest.param(31000, None, "static", 4.0, 1768, 1768, id="reserve clipped at the top rung"),
        pytest.param(32767, 1, "static", 4.0, 1, 1, id="exactly the maximum"),
        pytest.param(32767, None, "static", 4.0, 1, 1, id="room for one token"),
    ],
)
def test_the_default_policy(
    prompt: int, max_tokens: int | None, mode: str, factor: float, granted: int, granted_under_stop: int
) -> None:
    for growth, tokens in (("rerotate", granted), ("reprefill", granted), ("stop", granted_under_stop)):
        choice = Policy(GEOMETRY, growth=growth).choose(prompt, max_tokens)
        assert (choice.mode, choice.plan.factor, choice.max_tokens) == (mode, factor, tokens)
        assert choice.plan.scheme == ("default" if factor == 1.0 else "yarn")
        assert choice.plan.max_length == POLICY.coverage(factor)
        assert choice.growth == ("stop" if mode == "native" else growth)
        above = [] if choice.growth == "stop" else [rung for rung in POLICY.ladder if rung > factor]
        assert [plan.factor for plan in choice.rungs] == [factor, *above]
        assert [plan.max_length for plan in choice.rungs] == [POLICY.coverage(plan.factor) for plan in choice.rungs]


@pytest.mark.parametrize(
    ("growth", "max_tokens", "mode", "factor", "granted"),
    [
        ("rerotate", 1, "dynamic", 1.0, 1),
        ("rerotate", None, "dynamic", 1.0, 24576),
        ("reprefill", None, "dynamic", 1.0, 24576),
        ("stop", 1, "static", 1.25, 1),
        ("stop", None, "static", 1.25, 2048),
    ],
)
def test_a_prompt_of_exactly_the_native_length_starts_native_only_if_it_may_grow(
    growth: str, max_tokens: int | None, mode: str, factor: float, granted: int
) -> None:
    choice = Policy(GEOMETRY, growth=growth).choose(8192, max_tokens)
    assert (choice.mode, choice.plan.factor, choice.max_tokens) == (mode, factor, granted)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "numbers"),
    [
        (32767, 2, "max_tokens", ("32767", "2", "32768")),
        (100, 32669, "max_tokens", ("100", "32669", "32768")),
        (32768, 1, "prompt", ("32768",)),
        (32768, None, "prompt", ("32768",)),
        (40000, None, "prompt", ("40000", "32768")),
    ],
)
def test_above_the_maximum_is_refused_with_the_numbers(
    prompt: int, max_tokens: int | None, param: str, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ContextLengthError) as refusal:
        POLICY.choose(prompt, max_tokens)
    assert refusal.value.param == param
    assert all(number in refusal.value.message for number in numbers)


@settings(deadline=None)
@given(
    native=st.integers(min_value=2, max_value=5000),
    longest=st.integers(min_value=2, max_value=20000),
    growth=st.sampled_from(get_args(Growth)),
    data=st.data(),
)
def test_whatever_fits_gets_plans_with_room_for_a_token(
    native: int, longest: int, growth: Growth, data: st.DataObject
) -> None:
    policy = Policy(GEOMETRY, native_length=native, max_length=longest, reserve=100, growth=growth)
    prompt = data.draw(st.integers(min_value=1, max_value=longest - 1))
    max_tokens = data.draw(st.one_of(st.none(), st.integers(min_value=1, max_value=longest - prompt)))
    choice = policy.choose(prompt, max_tokens)
    asked = max_tokens or longest - prompt
    assert 1 <= choice.max_tokens <= asked
    assert prompt + choice.max_tokens <= choice.rungs[-1].max_length <= longest
    assert choice.plan.max_length >= prompt + (len(choice.rungs) == 1)
    reaches = [plan.max_length for plan in choice.rungs]
    assert reaches == sorted(set(reaches))
    if growth != "stop":
        assert choice.max_tokens == asked
    if prompt + asked <= native:
        assert (choice.mode, choice.max_tokens) == ("native", asked)
    if choice.mode == "static":
        assert choice.max_tokens >= min(asked, 100)
        smaller = [policy.coverage(rung) for rung in policy.ladder if rung < choice.plan.factor]
        assert all(covered < prompt + min(asked, 100) for covered in smaller)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "wish", "reason"),
    [
        (100, 50, RopeWish(), "prompt of 100 tokens + 50 to generate fits the native length 8192"),
        (
            *(100, 8093, RopeWish()),  # the last token is never computed
            "prompt of 100 tokens + up to 8093 to generate: starts at factor 1",
        ),
        (
            *(100, 8094, RopeWish()),
            "prompt of 100 tokens + up to 8094 to generate: starts at factor 1, "
            "grows to factor 1.25 beyond 8192 tokens",
        ),
        (
            *(100, 10141, RopeWish()),
            "prompt of 100 tokens + up to 10141 to generate: starts at factor 1, "
            "grows to factor 1.25 beyond 8192 tokens",
        ),
        (
            *(100, 10142, RopeWish()),
            "prompt of 100 tokens + up to 10142 to generate: starts at factor 1, "
            "grows to factor 1.25 beyond 8192 tokens, step by step up to factor 1.5",
        ),
        (
            *(100, None, RopeWish()),
            "prompt of 100 tokens + up to 32668 to generate: starts at factor 1, "
            "grows to factor 1.25 beyond 8192 tokens, step by step up to factor 4",
        ),
        (
            *(100, None, RopeWish(growth="stop")),
            "prompt of 100 tokens + up to 32668 to generate: starts at factor 1; generation ends at 8192 tokens",
        ),
        (
            *(8192, 8, RopeWish(growth="stop")),
            "prompt of 8192 tokens leaves no room to generate within the native length 8192: "
            "factor 1.25 covers 8192 + 8 reserved",
        ),
        (
            *(12000, 3000, RopeWish()),
            "prompt of 12000 tokens exceeds the native length 8192: factor 2 covers 12000 + 2048 reserved",
        ),
        (
            *(12000, 4386, RopeWish()),
            "prompt of 12000 tokens exceeds the native length 8192: factor 2 covers 12000 + 2048 reserved; "
            "grows to factor 2.5 beyond 16384 tokens",
        ),
        (
            *(31000, None, RopeWish()),
            "prompt of 31000 tokens exceeds the native length 8192: factor 4 covers 31000 + 1768 reserved",
        ),
        (
            *(100, 20000, RopeWish(factor=2.0)),
            "factor 2 as asked covers 16384 tokens; grows to factor 2.5 beyond 16384 tokens",
        ),
        (
            *(100, 20000, RopeWish(factor=2.0, growth="stop")),
            "factor 2 as asked covers 16384 tokens; generation ends at 16384 tokens",
        ),
        (100, None, RopeWish(mode="native"), "native as asked; generation ends at 8192 tokens"),
    ],
)
def test_the_reason_tells_what_will_happen(prompt: int, max_tokens: int | None, wish: RopeWish, reason: str) -> None:
    assert POLICY.choose(prompt, max_tokens, wish).reason == reason


@pytest.mark.parametrize(
    ("wish", "prompt", "max_tokens", "mode", "scheme", "factor", "granted"),
    [
        (RopeWish(), 100, 50, "native", "default", 1.0, 50),
        (RopeWish(growth="stop"), 9000, 50, "static", "yarn", 1.25, 50),
        (RopeWish(factor=2.0), 100, 50, "static", "yarn", 2.0, 50),
        (RopeWish(factor=2), 16384, None, "static", "yarn", 2.0, 16384),
        (RopeWish(factor=2, growth="stop"), 16383, None, "static", "yarn", 2.0, 1),
        (RopeWish(factor=1.0), 100, 8092, "native", "default", 1.0, 8092),
        (RopeWish(factor=1.0), 100, None, "dynamic", "default", 1.0, 32668),
        (RopeWish(factor=1.0), 8192, None, "dynamic", "default", 1.0, 24576),
        (RopeWish(factor=1.0, growth="stop"), 100, None, "native", "default", 1.0, 8092),
        (RopeWish(scheme="linear"), 100, 50, "native", "default", 1.0, 50),
        (RopeWish(scheme="linear"), 9000, 50, "static", "linear", 1.25, 50),
        (RopeWish(scheme="ntk", factor=4.0), 100, 50, "static", "ntk", 4.0, 50),
        (RopeWish(scheme="default"), 100, None, "native", "default", 1.0, 8092),
        (RopeWish(scheme="default", factor=1.0), 8191, None, "native", "default", 1.0, 1),
        (RopeWish(scheme="yarn", factor=1.0), 100, 50, "native", "default", 1.0, 50),
        (RopeWish(mode="native"), 100, None, "native", "default", 1.0, 8092),
        (RopeWish(mode="native", scheme="default", factor=1.0), 8191, 9, "native", "default", 1.0, 1),
        (RopeWish(mode="static"), 100, 50, "static", "default", 1.0, 50),
        (RopeWish(mode="static"), 6144, None, "static", "default", 1.0, 26624),
        (RopeWish(mode="static", growth="stop"), 6144, None, "static", "default", 1.0, 2048),
        (RopeWish(mode="static", growth="stop"), 6145, None, "static", "yarn", 1.25, 4095),
        (RopeWish(mode="static", scheme="yarn", factor=1.0), 100, 50, "static", "default", 1.0, 50),
        (RopeWish(mode="static", scheme="default"), 8191, None, "static", "default", 1.0, 1),
        (RopeWish(mode="dynamic"), 100, 50, "dynamic", "default", 1.0, 50),
        (RopeWish(mode="dynamic"), 8192, None, "dynamic", "default", 1.0, 24576),
        (RopeWish(mode="dynamic", growth="stop"), 8192, None, "dynamic", "yarn", 1.25, 2048),
        (RopeWish(mode="dynamic", scheme="dynamic", growth="stop"), 12287, None, "dynamic", "dynamic", 1.5, 1),
        (RopeWish(mode="dynamic", factor=3.0, growth="stop"), 100, None, "dynamic", "yarn", 3.0, 24476),
    ],
)
def test_wishes_granted(
    wish: RopeWish, prompt: int, max_tokens: int | None, mode: str, scheme: str, factor: float, granted: int
) -> None:
    choice = POLICY.choose(prompt, max_tokens, wish)
    assert (choice.mode, choice.plan.scheme, choice.plan.factor, choice.max_tokens) == (mode, scheme, factor, granted)


@pytest.mark.parametrize(
    ("wish", "prompt", "param", "said"),
    [
        (
            RopeWish(scheme="alibi"),
            100,
            "rope.scheme",
            "allowed: default, dynamic, .*linear, llama3, ntk, ntk-by-parts, yarn",
        ),
        (RopeWish(factor=3.5), 100, "rope.factor", "factor 3.5 is not available; allowed: 1, 1.25, 1.5, 2, 2.5, 3, 4"),
        (RopeWish(factor=0.5), 100, "rope.factor", "factor 0.5 is not available"),
        (RopeWish(factor=float("nan")), 100, "rope.factor", "factor nan is not available"),
        (RopeWish(factor=float("inf")), 100, "rope.factor", "factor inf is not available"),
        (
            RopeWish(factor=1.25, growth="stop"),
            10240,
            "rope.factor",
            "covers 10240 tokens.* 10240 tokens and one more; .*factor 1.5, 2, 2.5, 3, 4",
        ),
        (RopeWish(factor=1.25), 10241, "rope.factor", "covers 10240 tokens.* 10241 tokens; .*factor 1.5, 2, 2.5, 3, 4"),
        (RopeWish(factor=1.0, growth="stop"), 8192, "rope.factor", "covers 8192 tokens.* 8192 tokens and one more"),
        (RopeWish(mode="dynamic", factor=1.0), 8193, "rope.factor", "covers 8192 tokens"),
        (RopeWish(mode="native"), 8192, "rope.mode", "covers 8192 tokens.* 8192 tokens"),
        (RopeWish(mode="native"), 9000, "rope.mode", "covers 8192 tokens.* 9000 tokens"),
        (RopeWish(scheme="default"), 8192, "rope.scheme", "covers 8192 tokens.* 8192 tokens"),
        (RopeWish(scheme="default", mode="static"), 9000, "rope.scheme", "covers 8192 tokens"),
        (RopeWish(scheme="default", factor=2.0), 100, "rope.factor", "scheme 'default' goes only with factor 1"),
        (RopeWish(mode="native", factor=2.0), 100, "rope.factor", "mode native goes only with factor 1"),
        (RopeWish(mode="native", growth="rerotate"), 100, "rope.growth", "mode native goes only with growth stop"),
        (RopeWish(scheme="default", growth="reprefill"), 100, "rope.growth", "'default' goes only with growth stop"),
        (RopeWish(mode="native", scheme="yarn"), 100, "rope.scheme", "own scheme 'default', not 'yarn'"),
    ],
)
def test_wishes_refused_with_what_is_allowed(wish: RopeWish, prompt: int, param: str, said: str) -> None:
    with pytest.raises(WishError, match=said) as refusal:
        POLICY.choose(prompt, 1, wish)
    assert refusal.value.param == param


def test_a_factor_can_be_sent_back_as_it_was_told() -> None:
    policy = Policy(GEOMETRY, native_length=3000, max_length=7000)
    with pytest.raises(WishError, match=r"2\.3333333333333335"):
        policy.choose(10, 1, RopeWish(factor=2.3))
    assert policy.choose(10, None, RopeWish(factor=2.3333333333333335, growth="stop")).max_tokens == 6990


def test_a_factor_asked_for_as_an_integer_is_the_ladders_own() -> None:
    assert isinstance(Policy(GEOMETRY).choose(100, 50, RopeWish(factor=2)).plan.factor, float)


def test_a_rung_that_cannot_be_computed_for_this_model_is_refused_at_once() -> None:
    """A block of the config may lack what its own scheme needs for long sequences."""
    lacking = replace(LONGROPE, parameters={"short_factor": (1.0, 1.1, 1.2)})
    with pytest.raises(OptionError, match=r"'longrope' needs a long_factor table.* \(factor 32\)"):
        Policy(lacking)
    assert Policy(lacking, max_length=4096).choose(10, 10).plan.scheme == "longrope"


def odd(_geometry: RopeGeometry, factor: float, _length: int) -> Frequencies:
    """A scheme that has no numbers beyond a factor of 2."""
    return Frequencies(np.full(32, 1.0 if factor <= 2 else 0.0), 1.0)


def test_a_scheme_of_another_package_that_fails_on_a_rung_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("model_patches.schemes", "model_patches.plan"):
        monkeypatch.setattr(f"{module}.known_schemes", lambda: SCHEMES | {"odd": odd})
    assert Policy(GEOMETRY, scheme="odd", ladder=[1.5, 2]).choose(9000, 1).plan.scheme == "odd"
    for options in ({"scheme": "odd"}, {"ladder": [1.5, {"factor": 3, "scheme": "odd"}]}):
        with pytest.raises(OptionError, match=r"scheme 'odd' returned the inverse frequency 0.*\(factor (2\.5|3)\)"):
            Policy(GEOMETRY, **options)
    with pytest.raises(WishError, match="scheme 'odd' returned") as refusal:  # nobody needs it who does not ask
        Policy(GEOMETRY).choose(10, 10, RopeWish(scheme="odd", factor=4.0))
    assert refusal.value.param == "rope.scheme"


def test_the_length_is_checked_before_the_wish() -> None:
    with pytest.raises(ContextLengthError):
        POLICY.choose(40000, None, RopeWish(scheme="alibi"))


@pytest.mark.parametrize("scheme", ["default", "linear", "ntk", "dynamic", "yarn"])
@pytest.mark.parametrize("mode", ["static", "dynamic", None])
def test_at_factor_one_every_scheme_is_the_native_plan_bit_for_bit(scheme: str, mode: Mode | None) -> None:
    native = make_plan(GEOMETRY, "default", 1.0, 8192)
    assert POLICY.choose(100, 50, RopeWish(scheme=scheme, mode=mode, factor=1.0)).plan == native
    assert POLICY.choose(100, 50).plan == native


def test_a_plan_is_computed_once() -> None:
    policy = Policy(GEOMETRY)
    assert policy.choose(9000, 50).plan is policy.choose(9500, 60).plan
    assert policy.choose(10, 10).plan is policy.choose(20, 9000).plan


def test_the_servers_scheme_stretches_by_default() -> None:
    assert {plan.scheme for plan in Policy(GEOMETRY, scheme="linear").choose(9000, 50).rungs} == {"linear"}


def test_the_reserve_is_a_setting() -> None:
    assert Policy(GEOMETRY, reserve=1).choose(10239, None).plan.factor == 1.25
    assert Policy(GEOMETRY, reserve=2).choose(10239, None).plan.factor == 1.5


def test_a_set_native_length_is_also_the_original_length_of_the_formulas() -> None:
    policy = Policy(GEOMETRY, native_length=256)
    assert (policy.native_length, policy.max_length) == (256, 1024)
    plan = policy.choose(300, 100, RopeWish(growth="stop")).plan
    small = RopeGeometry(rotary_dim=64, theta=1e5, original_length=256, native_length=256)
    assert plan == make_plan(small, "yarn", 2.0, 512)
    assert plan.inv_freq != make_plan(GEOMETRY, "yarn", 2.0, 512).inv_freq


def test_a_maximum_below_the_native_length_leaves_only_the_native_plan() -> None:
    policy = Policy(GEOMETRY, max_length=1000)
    assert policy.ladder == (1.0,)
    choice = policy.choose(999, None)
    assert (choice.mode, choice.plan.max_length, choice.max_tokens) == ("native", 1000, 1)
    with pytest.raises(ContextLengthError, match="1000"):
        policy.choose(1000, None)


def test_a_scaled_model_keeps_its_own_plan() -> None:
    policy = Policy(SCALED)
    assert (policy.native_length, policy.max_length, policy.ladder) == (131072, 131072, (32.0,))
    own = make_plan(SCALED, "yarn", 32.0, 131072)
    for prompt, max_tokens in [(1, 1), (100, None), (131071, 1)]:
        choice = policy.choose(prompt, max_tokens)
        assert (choice.mode, choice.plan) == ("native", own)
    assert policy.choose(100, 50, RopeWish(scheme="yarn", factor=32.0, mode="static")).plan == own
    assert Policy(SCALED, max_length=5000).choose(4999, None).plan.max_length == 5000


@pytest.mark.parametrize(
    "wish", [RopeWish(factor=1.0), RopeWish(factor=64.0), RopeWish(scheme="ntk"), RopeWish(scheme="default")]
)
def test_a_scaled_model_refuses_other_scalings_and_says_why(wish: RopeWish) -> None:
    with pytest.raises(WishError, match=r"itself scaled \(yarn, factor 32\)"):
        Policy(SCALED).choose(100, 50, wish)


def test_a_longrope_model_has_a_short_and_a_long_plan_of_its_own() -> None:
    policy = Policy(LONGROPE)
    assert (policy.native_length, policy.max_length, policy.ladder) == (4096, 131072, (1.0, 32.0))
    short, long = make_plan(LONGROPE, "longrope", 1.0, 4096), make_plan(LONGROPE, "longrope", 32.0, 131072)
    assert short.inv_freq != long.inv_freq
    assert short.attention_factor == long.attention_factor
    for prompt, max_tokens, mode, plan in [
        (1, 4095, "native", short),
        (1, 4096, "dynamic", short),
        (4095, 1, "native", short),
        (4096, 1, "dynamic", short),
        (4097, 1, "static", long),
        (131071, 1, "static", long),
    ]:
        choice = policy.choose(prompt, max_tokens)
        assert (choice.mode, choice.plan) == (mode, plan)
    assert policy.choose(1, None).rungs == (short, long)
    assert policy.choose(1, None, RopeWish(mode="native")).rungs == (short,)
    assert policy.choose(10, 10, RopeWish(factor=32.0)).rungs == (long,)
    assert policy.choose(10, 10, RopeWish(scheme="longrope", mode="static")).plan == short
    assert Policy(LONGROPE, max_length=5000).choose(4999, None).plan.inv_freq == long.inv_freq
    assert Policy(LONGROPE, max_length=4096).ladder == (1.0,)
    with pytest.raises(WishError, match=r"itself scaled \(longrope, factor 32\)"):
        policy.choose(10, 10, RopeWish(scheme="yarn"))


def test_a_dynamic_model_is_native_up_to_its_length_and_has_a_ladder() -> None:
    policy = Policy(DYNAMIC, scheme="dynamic")
    unscaled = make_plan(GEOMETRY, "default", 1.0, 8192)
    native = policy.choose(100, 50).plan
    assert (native.scheme, native.inv_freq) == ("dynamic", unscaled.inv_freq)
    stretched = policy.choose(12288, 4096).plan
    assert (stretched.scheme, stretched.factor) == ("dynamic", 2.0)
    assert unscaled.inv_freq[-1] / stretched.inv_freq[-1] == pytest.approx(3.0 * 2 - 2)
    assert policy.choose(100, 50, RopeWish(mode="native", scheme="dynamic")).plan is native


def test_a_scheme_that_was_asked_for_and_is_not_needed_is_named_in_the_reason() -> None:
    choice = POLICY.choose(100, 50, RopeWish(scheme="ntk"))
    assert choice.plan.scheme == "default"
    assert "ntk as asked would begin beyond the native length 8192" in choice.reason


class TestGrowth:
    def test_a_wished_scheme_stays_the_same_on_every_rung_above_the_native_one(self) -> None:
        schemes = [plan.scheme for plan in POLICY.choose(100, None, RopeWish(scheme="ntk")).rungs]
        assert schemes == ["default", *["ntk"] * 6]

    def test_a_rung_with_a_scheme_of_its_own_keeps_it_unless_a_request_asks_for_another(self) -> None:
        policy = Policy(GEOMETRY, ladder=[{"factor": 1.5, "scheme": "ntk"}, 2, 4], scheme="linear")
        assert [plan.scheme for plan in policy.choose(100, None).rungs] == ["default", "ntk", "linear", "linear"]
        wished = policy.choose(100, None, RopeWish(scheme="yarn"))
        assert [plan.scheme for plan in wished.rungs] == ["default", "yarn", "yarn", "yarn"]

    def test_rungs_that_rotate_alike_are_one_that_reaches_further(self) -> None:
        """A table of divisors says the same for short and for long sequences."""
        alike = {"short_factor": (1.0, 2.0, 3.0), "long_factor": (1.0, 2.0, 3.0)}
        (plan,) = Policy(replace(LONGROPE, parameters=alike)).choose(100, None).rungs
        assert plan.max_length == 131072

    def test_a_scaled_model_has_nothing_to_grow_into(self) -> None:
        for wish in (RopeWish(), RopeWish(growth="rerotate"), RopeWish(mode="dynamic")):
            assert len(Policy(SCALED).choose(100, None, wish).rungs) == 1

    @pytest.mark.parametrize("growth", get_args(Growth))
    def test_a_native_request_has_one_rung_whatever_growth_it_asks_for(self, growth: Growth) -> None:
        choice = POLICY.choose(100, 50, RopeWish(growth=growth))
        assert (choice.mode, choice.growth, len(choice.rungs)) == ("native", growth, 1)

    def test_the_refresh_is_carried(self) -> None:
        assert Policy(GEOMETRY).growth_refresh_tokens == 0
        assert Policy(GEOMETRY, growth_refresh_tokens=7).growth_refresh_tokens == 7


def test_reuse_of_prefixes_is_the_servers_unless_a_request_asks() -> None:
    assert POLICY.choose(1, 1).prefix_reuse == "same-plan"
    assert POLICY.choose(1, 1, RopeWish(prefix_reuse="rerotate")).prefix_reuse == "rerotate"
    sharing = Policy(GEOMETRY, prefix_reuse="rerotate")
    assert sharing.choose(1, 1).prefix_reuse == "rerotate"
    assert sharing.choose(1, 1, RopeWish(prefix_reuse="same-plan")).prefix_reuse == "same-plan"


class TestModeRules:
    RULES = (
        {"prompt_tokens": 4096, "mode": "native"},
        {"prompt_tokens": 6000, "mode": "dynamic"},
        {"mode": "static"},
    )
    POLICY = Policy(GEOMETRY, mode=RULES)

    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "mode", "factor", "granted", "reason"),
        [
            (4096, 10, "native", 1.0, 10, "prompt of 4096 tokens + 10 to generate fits the native length 8192"),
            (
                *(4096, None, "native", 1.0, 4096),
                "prompt of 4096 tokens: native for prompts up to 4096 tokens, as this server's policy says; "
                "generation ends at 8192 tokens",
            ),
            (
                *(4097, 10, "dynamic", 1.0, 10),
                "prompt of 4097 tokens + up to 10 to generate: dynamic for prompts up to 6000 tokens, "
                "as this server's policy says: starts at factor 1",
            ),
            (
                *(6001, 2048, "static", 1.0, 2048),
                "static, as this server's policy says: factor 1 covers 6001 + 2048 reserved",
            ),
            (
                *(9000, 10, "static", 1.25, 10),
                "prompt of 9000 tokens exceeds the native length 8192: factor 1.25 covers 9000 + 10 reserved",
            ),
        ],
    )
    def test_the_first_rule_whose_length_is_not_exceeded_decides(
        self, prompt: int, max_tokens: int | None, mode: str, factor: float, granted: int, reason: str
    ) -> None:
        choice = self.POLICY.choose(prompt, max_tokens)
        assert (choice.mode, choice.plan.factor, choice.max_tokens, choice.reason) == (mode, factor, granted, reason)

    @pytest.mark.parametrize(
        ("wish", "mode"),
        [
            (RopeWish(mode="static"), "static"),
            (RopeWish(factor=2.0), "static"),
            (RopeWish(growth="rerotate"), "dynamic"),
            (RopeWish(growth="stop"), "native"),
        ],
    )
    def test_what_a_request_asks_for_wins(self, wish: RopeWish, mode: str) -> None:
        assert self.POLICY.choose(100, None, wish).mode == mode


class TestRequestsMayChoose:
    @pytest.mark.parametrize(
        ("allowed", "wish", "refused"),
        [
            (True, RopeWish("yarn", "static", 2.0, "stop", "same-plan"), None),
            (False, RopeWish(), None),
            (False, RopeWish(scheme="yarn"), "scheme"),
            (False, RopeWish(prefix_reuse="same-plan"), "prefix_reuse"),
            (["growth"], RopeWish(growth="stop"), None),
            (["growth", "factor"], RopeWish(growth="stop", mode="native"), "mode"),
            (["growth", "mode"], RopeWish(factor=1.0), "factor"),
        ],
    )
    def test_a_refused_wish_says_what_is_allowed(self, allowed: object, wish: RopeWish, refused: str | None) -> None:
        policy = Policy(GEOMETRY, requests_may_choose=allowed)
        if refused is None:
            policy.choose(100, 50, wish)
            return
        listed = ", ".join(allowed) if isinstance(allowed, list) else "nothing"
        with pytest.raises(WishError, match=f"^{refused} is not a request's choice.*allowed: {listed}$") as refusal:
            policy.choose(100, 50, wish)
        assert refusal.value.param == f"rope.{refused}"
