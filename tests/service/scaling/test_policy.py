"""The default policy as tables, with every edge: L is 8192, the maximum length 32768."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_patches.geometry import RopeGeometry
from model_patches.plan import make_plan
from service.errors import ContextLengthError, StartupError, WishError
from service.scaling.policy import Mode, Policy, RopeWish, build_ladder

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
    ],
)
def test_the_ladder(native: int, longest: int, ladder: tuple[float, ...]) -> None:
    assert build_ladder(native, longest) == ladder


def test_the_defaults() -> None:
    assert (POLICY.native_length, POLICY.max_length) == (8192, 32768)
    assert [POLICY.coverage(rung) for rung in POLICY.ladder] == [8192, 10240, 12288, 16384, 20480, 24576, 32768]


@settings(deadline=None)
@given(native=st.integers(min_value=1, max_value=10**6), longest=st.integers(min_value=2, max_value=10**7))
def test_rungs_rise_and_the_top_covers_exactly_the_maximum(native: int, longest: int) -> None:
    policy = Policy(GEOMETRY, native_length=native, max_length=longest)
    coverages = [policy.coverage(rung) for rung in policy.ladder]
    assert list(policy.ladder) == sorted(set(policy.ladder))
    assert coverages == sorted(coverages)
    assert coverages[-1] == longest
    assert coverages[0] == min(native, longest)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "mode", "factor", "granted"),
    [
        pytest.param(1, 1, "native", 1.0, 1, id="shortest"),
        pytest.param(100, 8092, "native", 1.0, 8092, id="exactly L together"),
        pytest.param(8191, 1, "native", 1.0, 1, id="exactly L together, one to generate"),
        pytest.param(100, 8093, "dynamic", 1.0, 8092, id="L + 1 together"),
        pytest.param(8191, 2, "dynamic", 1.0, 1, id="L + 1 together, prompt one short of L"),
        pytest.param(100, None, "dynamic", 1.0, 8092, id="all that remains"),
        pytest.param(100, 32668, "dynamic", 1.0, 8092, id="exactly the maximum together"),
        pytest.param(8192, 1, "static", 1.25, 1, id="prompt exactly L"),
        pytest.param(8192, None, "static", 1.25, 2048, id="prompt exactly L, all that remains"),
        pytest.param(8193, 1, "static", 1.25, 1, id="prompt L + 1"),
        pytest.param(8193, 2047, "static", 1.25, 2047, id="fills the rung with the reserve just not reached"),
        pytest.param(8193, None, "static", 1.5, 4095, id="the reserve exceeds the rung by one"),
        pytest.param(12000, 200, "static", 1.5, 200, id="max_tokens below the reserve"),
        pytest.param(12000, 15000, "static", 2.0, 4384, id="max_tokens above the reserve ends with the plan"),
        pytest.param(31000, None, "static", 4.0, 1768, id="reserve clipped at the top rung"),
        pytest.param(32767, 1, "static", 4.0, 1, id="exactly the maximum"),
        pytest.param(32767, None, "static", 4.0, 1, id="room for one token"),
    ],
)
def test_the_default_policy(prompt: int, max_tokens: int | None, mode: str, factor: float, granted: int) -> None:
    choice = POLICY.choose(prompt, max_tokens)
    assert (choice.mode, choice.plan.factor, choice.max_tokens) == (mode, factor, granted)
    assert choice.plan.scheme == ("default" if factor == 1.0 else "yarn")
    assert choice.plan.max_length == POLICY.coverage(factor)
    assert choice.growth == "stop"


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
    native=st.integers(min_value=1, max_value=5000),
    longest=st.integers(min_value=2, max_value=20000),
    data=st.data(),
)
def test_whatever_fits_gets_a_plan_with_room_for_a_token(native: int, longest: int, data: st.DataObject) -> None:
    policy = Policy(GEOMETRY, native_length=native, max_length=longest, reserve=100)
    prompt = data.draw(st.integers(min_value=1, max_value=longest - 1))
    max_tokens = data.draw(st.one_of(st.none(), st.integers(min_value=1, max_value=longest - prompt)))
    choice = policy.choose(prompt, max_tokens)
    asked = max_tokens or longest - prompt
    assert 1 <= choice.max_tokens <= asked
    assert prompt + choice.max_tokens <= choice.plan.max_length <= longest
    if prompt + asked <= native:
        assert (choice.mode, choice.max_tokens) == ("native", asked)
    if choice.mode == "static":
        assert choice.max_tokens >= min(asked, 100)
        smaller = [policy.coverage(rung) for rung in policy.ladder if rung < choice.plan.factor]
        assert all(covered < prompt + min(asked, 100) for covered in smaller)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [
        (100, 50, "prompt of 100 tokens + 50 to generate fits the native length 8192"),
        (
            100,
            None,
            "prompt of 100 tokens + up to 32668 to generate: starts at factor 1; generation ends at 8192 tokens",
        ),
        (
            8192,
            8,
            "prompt of 8192 tokens leaves no room to generate within the native length 8192: "
            "factor 1.25 covers 8192 + 8 reserved",
        ),
        (
            12000,
            3000,
            "prompt of 12000 tokens exceeds the native length 8192: factor 2 covers 12000 + 2048 reserved",
        ),
        (
            31000,
            None,
            "prompt of 31000 tokens exceeds the native length 8192: factor 4 covers 31000 + 1768 reserved",
        ),
    ],
)
def test_the_reason_is_told_in_words(prompt: int, max_tokens: int | None, reason: str) -> None:
    assert POLICY.choose(prompt, max_tokens).reason == reason


@pytest.mark.parametrize(
    ("wish", "prompt", "max_tokens", "mode", "scheme", "factor", "granted"),
    [
        (RopeWish(), 100, 50, "native", "default", 1.0, 50),
        (RopeWish(growth="stop"), 9000, 50, "static", "yarn", 1.25, 50),
        (RopeWish(factor=2.0), 100, 50, "static", "yarn", 2.0, 50),
        (RopeWish(factor=2), 16383, None, "static", "yarn", 2.0, 1),
        (RopeWish(factor=1.0), 100, None, "native", "default", 1.0, 8092),
        (RopeWish(scheme="linear"), 100, 50, "native", "default", 1.0, 50),
        (RopeWish(scheme="linear"), 9000, 50, "static", "linear", 1.25, 50),
        (RopeWish(scheme="ntk", factor=4.0), 100, 50, "static", "ntk", 4.0, 50),
        (RopeWish(scheme="default"), 100, None, "native", "default", 1.0, 8092),
        (RopeWish(scheme="default", factor=1.0), 8191, None, "native", "default", 1.0, 1),
        (RopeWish(scheme="yarn", factor=1.0), 100, 50, "native", "default", 1.0, 50),
        (RopeWish(mode="native"), 100, None, "native", "default", 1.0, 8092),
        (RopeWish(mode="native", scheme="default", factor=1.0), 8191, 9, "native", "default", 1.0, 1),
        (RopeWish(mode="static"), 100, 50, "static", "default", 1.0, 50),
        (RopeWish(mode="static"), 6144, None, "static", "default", 1.0, 2048),
        (RopeWish(mode="static"), 6145, None, "static", "yarn", 1.25, 4095),
        (RopeWish(mode="static", scheme="yarn", factor=1.0), 100, 50, "static", "default", 1.0, 50),
        (RopeWish(mode="static", scheme="default"), 8191, None, "static", "default", 1.0, 1),
        (RopeWish(mode="dynamic"), 100, 50, "dynamic", "default", 1.0, 50),
        (RopeWish(mode="dynamic"), 8192, None, "dynamic", "yarn", 1.25, 2048),
        (RopeWish(mode="dynamic", scheme="dynamic"), 12287, None, "dynamic", "dynamic", 1.5, 1),
        (RopeWish(mode="dynamic", factor=3.0), 100, None, "dynamic", "yarn", 3.0, 24476),
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
            "allowed: default, dynamic, linear, llama3, ntk, ntk-by-parts, yarn",
        ),
        (RopeWish(factor=3.5), 100, "rope.factor", "factor 3.5 is not available; allowed: 1, 1.25, 1.5, 2, 2.5, 3, 4"),
        (RopeWish(factor=0.5), 100, "rope.factor", "factor 0.5 is not available"),
        (RopeWish(factor=float("nan")), 100, "rope.factor", "factor nan is not available"),
        (RopeWish(factor=float("inf")), 100, "rope.factor", "factor inf is not available"),
        (RopeWish(factor=1.25), 10240, "rope.factor", "covers 10240 tokens.* 10240 tokens .*factor 1.5, 2, 2.5, 3, 4"),
        (RopeWish(factor=1.0), 8192, "rope.factor", "covers 8192 tokens.* 8192 tokens"),
        (RopeWish(mode="dynamic", factor=1.0), 8192, "rope.factor", "covers 8192 tokens"),
        (RopeWish(mode="native"), 8192, "rope.mode", "covers 8192 tokens.* 8192 tokens"),
        (RopeWish(mode="native"), 9000, "rope.mode", "covers 8192 tokens.* 9000 tokens"),
        (RopeWish(scheme="default"), 8192, "rope.scheme", "covers 8192 tokens.* 8192 tokens"),
        (RopeWish(scheme="default", mode="static"), 9000, "rope.scheme", "covers 8192 tokens"),
        (RopeWish(scheme="default", factor=2.0), 100, "rope.factor", "scheme 'default' goes only with factor 1"),
        (RopeWish(mode="native", factor=2.0), 100, "rope.factor", "mode native goes only with factor 1"),
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
    assert policy.choose(10, None, RopeWish(factor=2.3333333333333335)).max_tokens == 6990


def test_a_factor_asked_for_as_an_integer_is_the_ladders_own() -> None:
    assert isinstance(Policy(GEOMETRY).choose(100, 50, RopeWish(factor=2)).plan.factor, float)


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
    assert Policy(GEOMETRY, scheme="linear").choose(9000, 50).plan.scheme == "linear"


def test_the_reserve_is_a_setting() -> None:
    assert Policy(GEOMETRY, reserve=1).choose(10239, None).plan.factor == 1.25
    assert Policy(GEOMETRY, reserve=2).choose(10239, None).plan.factor == 1.5


def test_a_set_native_length_is_also_the_original_length_of_the_formulas() -> None:
    policy = Policy(GEOMETRY, native_length=256)
    assert (policy.native_length, policy.max_length) == (256, 1024)
    plan = policy.choose(300, 100).plan
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
        (4096, 1, "static", long),
        (131071, 1, "static", long),
    ]:
        choice = policy.choose(prompt, max_tokens)
        assert (choice.mode, choice.plan) == (mode, plan)
    assert policy.choose(10, 10, RopeWish(factor=32.0)).plan == long
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


@pytest.mark.parametrize(
    ("geometry", "options", "said"),
    [
        (GEOMETRY, {"scheme": "alibi"}, "scheme must be one of dynamic, linear, llama3, ntk, ntk-by-parts, yarn"),
        (GEOMETRY, {"scheme": "default"}, "scheme must be one of"),
        (GEOMETRY, {"reserve": 0}, "reserve must be at least 1"),
        (GEOMETRY, {"growth": "rerotate"}, "growth must be 'stop', it is 'rerotate'"),
        (GEOMETRY, {"native_length": 0}, "native length must be at least 1"),
        (GEOMETRY, {"max_length": 1}, "maximum length must leave room"),
        (SCALED, {"native_length": 4096}, r"native length cannot be set.*yarn, factor 32"),
        (SCALED, {"max_length": 131073}, "131073 is above the trained length 131072"),
    ],
)
def test_settings_out_of_range_are_refused(geometry: RopeGeometry, options: dict[str, object], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        Policy(geometry, **options)  # type: ignore[arg-type]


def test_a_scheme_that_was_asked_for_and_is_not_needed_is_named_in_the_reason() -> None:
    choice = POLICY.choose(100, 50, RopeWish(scheme="ntk"))
    assert choice.plan.scheme == "default"
    assert "ntk as asked would begin beyond the native length 8192" in choice.reason
