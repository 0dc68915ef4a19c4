"""What every scheme promises, each within the domain in which it does."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.schemes import SCHEMES, schemes_for

FIXED = ("linear", "ntk", "ntk-by-parts", "yarn", "llama3")  # schemes that stretch by the factor, whatever the length
DYNAMIC = ("dynamic", "dynamic-yarn")  # those that stretch by the length, whatever the factor


@st.composite
def geometries(draw: st.DrawFn) -> RopeGeometry:
    length = draw(st.integers(min_value=512, max_value=200_000))
    return RopeGeometry(
        rotary_dim=2 * draw(st.integers(min_value=2, max_value=128)),
        theta=draw(st.floats(min_value=1e3, max_value=1e7)),
        original_length=length,
        native_length=length,
    )


FACTORS = st.floats(min_value=1.0, max_value=64.0)


@pytest.mark.parametrize("scheme", FIXED)
@settings(deadline=None)
@given(geometry=geometries())
def test_factor_one_is_the_default(scheme: str, geometry: RopeGeometry) -> None:
    default = SCHEMES["default"](geometry, 1.0, geometry.native_length)
    frequencies = SCHEMES[scheme](geometry, 1.0, geometry.native_length)
    np.testing.assert_allclose(frequencies.inv_freq, default.inv_freq, rtol=1e-15)
    assert frequencies.attention_factor == 1.0


@pytest.mark.parametrize("scheme", DYNAMIC)
@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS, length=st.integers(min_value=1, max_value=200_000))
def test_dynamic_schemes_are_the_default_up_to_the_original_length(
    scheme: str, geometry: RopeGeometry, factor: float, length: int
) -> None:
    default = SCHEMES["default"](geometry, 1.0, length)
    frequencies = SCHEMES[scheme](geometry, factor, min(length, geometry.original_length))
    np.testing.assert_allclose(frequencies.inv_freq, default.inv_freq, rtol=1e-15)
    assert frequencies.attention_factor == 1.0


@settings(deadline=None)
@given(geometry=geometries(), own=FACTORS, length=st.integers(min_value=1, max_value=200_000))
def test_dynamic_with_a_factor_of_its_own_starts_at_the_original_length_too(
    geometry: RopeGeometry, own: float, length: int
) -> None:
    native = replace(geometry, scheme="dynamic", parameters={"factor": own})
    default = SCHEMES["default"](native, 1.0, length)
    frequencies = SCHEMES["dynamic"](native, own, min(length, native.original_length))
    np.testing.assert_allclose(frequencies.inv_freq, default.inv_freq, rtol=1e-12)
    beyond = SCHEMES["dynamic"](native, own, native.original_length + 1)
    assert beyond.inv_freq[-1] < default.inv_freq[-1]


@pytest.mark.parametrize("scheme", DYNAMIC)
@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS, length=st.integers(min_value=1, max_value=10**6))
def test_dynamic_schemes_do_not_see_the_factor(scheme: str, geometry: RopeGeometry, factor: float, length: int) -> None:
    one, other = SCHEMES[scheme](geometry, 1.0, length), SCHEMES[scheme](geometry, factor, length)
    assert one.inv_freq.tolist() == other.inv_freq.tolist()
    assert one.attention_factor == other.attention_factor


@pytest.mark.parametrize("scheme", FIXED)
@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS, length=st.integers(min_value=1, max_value=10**6))
def test_fixed_schemes_do_not_see_the_length(scheme: str, geometry: RopeGeometry, factor: float, length: int) -> None:
    one, other = SCHEMES[scheme](geometry, factor, 1), SCHEMES[scheme](geometry, factor, length)
    assert one.inv_freq.tolist() == other.inv_freq.tolist()
    assert one.attention_factor == other.attention_factor


@settings(deadline=None)
@given(geometry=geometries(), factor=st.integers(min_value=1, max_value=16))
def test_dynamic_without_a_factor_of_its_own_is_ntk_at_the_ratio_of_lengths(
    geometry: RopeGeometry, factor: int
) -> None:
    dynamic = SCHEMES["dynamic"](geometry, 1.0, factor * geometry.original_length)
    ntk = SCHEMES["ntk"](geometry, float(factor), 1)
    np.testing.assert_allclose(dynamic.inv_freq, ntk.inv_freq, rtol=1e-12)


# llama3 keeps the fastest pair where that turns `high_freq_factor` times within L, which by default takes 26 tokens.
@pytest.mark.parametrize("scheme", ["ntk", "dynamic", "ntk-by-parts", "yarn", "dynamic-yarn", "llama3"])
@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS)
def test_the_fastest_pair_is_untouched(scheme: str, geometry: RopeGeometry, factor: float) -> None:
    frequencies = SCHEMES[scheme](geometry, factor, 4 * geometry.original_length)
    assert frequencies.inv_freq[0] == 1.0


@pytest.mark.parametrize("scheme", ["ntk", "linear"])
@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS)
def test_the_slowest_pair_is_divided_by_exactly_the_factor(scheme: str, geometry: RopeGeometry, factor: float) -> None:
    default = SCHEMES["default"](geometry, 1.0, geometry.native_length)
    frequencies = SCHEMES[scheme](geometry, factor, geometry.native_length)
    assert default.inv_freq[-1] / frequencies.inv_freq[-1] == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("scheme", ["ntk-by-parts", "yarn", "dynamic-yarn"])
@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS)
def test_by_parts_so_is_the_slowest_pair_if_the_ramp_ends_before_it(
    scheme: str, geometry: RopeGeometry, factor: float
) -> None:
    last = geometry.rotary_dim // 2 - 1
    turning_once = math.log(geometry.original_length / (2 * math.pi)) / math.log(geometry.theta)
    assume(math.ceil(turning_once * geometry.rotary_dim / 2) <= last)
    length = round(factor * geometry.original_length)
    stretch = length / geometry.original_length
    default = SCHEMES["default"](geometry, 1.0, length)
    frequencies = SCHEMES[scheme](geometry, stretch, length)
    assert default.inv_freq[-1] / frequencies.inv_freq[-1] == pytest.approx(stretch, rel=1e-12)


@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS)
def test_linear_divides_every_pair_alike(geometry: RopeGeometry, factor: float) -> None:
    default = SCHEMES["default"](geometry, 1.0, geometry.native_length)
    frequencies = SCHEMES["linear"](geometry, factor, geometry.native_length)
    np.testing.assert_allclose(default.inv_freq / frequencies.inv_freq, factor, rtol=1e-15)


@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS)
def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones(geometry: RopeGeometry, factor: float) -> None:
    default = SCHEMES["default"](geometry, 1.0, geometry.native_length).inv_freq
    slowdown = default / SCHEMES["yarn"](geometry, factor, geometry.native_length).inv_freq
    assert np.all(np.diff(slowdown) >= -1e-9)
    pairs = np.arange(geometry.rotary_dim // 2)
    turns = geometry.original_length * default / (2 * np.pi)
    # The ends of the ramp are rounded outwards to whole pairs, and a ramp from the last pair back to itself is cut off.
    fast, slow = pairs[turns > 32], pairs[turns < 1]
    np.testing.assert_allclose(slowdown[fast[:-1]], 1.0, rtol=1e-12)
    np.testing.assert_allclose(slowdown[slow[1:]], factor, rtol=1e-12)


@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS)
def test_ntk_by_parts_is_yarn_without_sharpening(geometry: RopeGeometry, factor: float) -> None:
    yarn = SCHEMES["yarn"](geometry, factor, geometry.native_length)
    by_parts = SCHEMES["ntk-by-parts"](geometry, factor, geometry.native_length)
    assert by_parts.inv_freq.tolist() == yarn.inv_freq.tolist()
    assert by_parts.attention_factor == 1.0


def test_ntk_by_parts_takes_the_options_of_its_own_block() -> None:
    def geometry(scheme: str) -> RopeGeometry:
        return RopeGeometry(64, 1e4, 2048, 8192, scheme, 4.0, {"beta_fast": 8, "beta_slow": 2, "truncate": False})

    own = SCHEMES["ntk-by-parts"](geometry("ntk-by-parts"), 4.0, 8192).inv_freq
    assert own.tolist() == SCHEMES["yarn"](geometry("yarn"), 4.0, 8192).inv_freq.tolist()
    assert own.tolist() != SCHEMES["ntk-by-parts"](geometry("default"), 4.0, 8192).inv_freq.tolist()


# LongRoPE's tables and CLEX's weights are a model's own and may do anything, so what follows does not hold for them.
@pytest.mark.parametrize("scheme", sorted(SCHEMES.keys() - {"longrope", "clex"}))
@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS)
def test_frequencies_fall_from_pair_to_pair(scheme: str, geometry: RopeGeometry, factor: float) -> None:
    inv_freq = SCHEMES[scheme](geometry, factor, round(factor * geometry.native_length)).inv_freq
    assert inv_freq.shape == (geometry.rotary_dim // 2,)
    assert np.all(np.diff(inv_freq) < 0)
    assert inv_freq[-1] > 0


@pytest.mark.parametrize("scheme", FIXED)
@settings(deadline=None)
@given(geometry=geometries(), factor=FACTORS)
def test_a_larger_factor_never_speeds_a_pair_up(scheme: str, geometry: RopeGeometry, factor: float) -> None:
    less = SCHEMES[scheme](geometry, factor, geometry.native_length)
    more = SCHEMES[scheme](geometry, 2 * factor, geometry.native_length)
    assert np.all(more.inv_freq <= less.inv_freq * (1 + 1e-12))
    if scheme in ("linear", "ntk"):  # by parts, even the slowest pair is kept where it turns often enough
        assert more.inv_freq[-1] < less.inv_freq[-1]
    if scheme == "yarn":
        assert more.attention_factor > less.attention_factor


def test_options_of_the_configs_own_scheme_stay_with_that_scheme() -> None:
    options = {"factor": 3.0, "attention_factor": 0.5, "beta_fast": 4}
    plain = RopeGeometry(rotary_dim=64, theta=1e4, original_length=2048, native_length=2048)
    other = RopeGeometry(
        rotary_dim=64, theta=1e4, original_length=2048, native_length=2048, scheme="linear", parameters=options
    )
    for scheme in schemes_for(plain):
        expected = SCHEMES[scheme](plain, 2.0, 4096)
        frequencies = SCHEMES[scheme](other, 2.0, 4096)
        assert frequencies.inv_freq.tolist() == expected.inv_freq.tolist()
        assert frequencies.attention_factor == expected.attention_factor


def longrope(stretch: float = 4.0, original_length: int = 4096, **options: object) -> RopeGeometry:
    tables = {"short_factor": (1.0, 1.5, 1.25), "long_factor": (2.0, 8.0, 4.0)}
    return RopeGeometry(6, 1e4, original_length, original_length, "longrope", stretch, {**tables, **options})


@pytest.mark.parametrize(
    ("length", "divisors"),
    [(1, [1.0, 1.5, 1.25]), (4096, [1.0, 1.5, 1.25]), (4097, [2.0, 8.0, 4.0]), (16384, [2.0, 8.0, 4.0])],
)
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_longrope_changes_its_table_above_the_original_length(
    length: int, divisors: list[float], factor: float
) -> None:
    default = SCHEMES["default"](longrope(), 1.0, length).inv_freq
    assert (default / SCHEMES["longrope"](longrope(), factor, length).inv_freq).tolist() == pytest.approx(divisors)


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        pytest.param(longrope(stretch=16.0, original_length=256), 1.5**0.5, id="square root of 1 + ln 16 / ln 256"),
        pytest.param(longrope(factor=16.0, original_length=256), 1.5**0.5, id="the block's own factor wins"),
        pytest.param(longrope(attention_factor=1.25), 1.25, id="an explicit one wins"),
        pytest.param(longrope(stretch=1.0), 1.0, id="not stretched"),
        pytest.param(longrope(factor=0.5), 1.0, id="shrunk"),
    ],
)
def test_longrope_has_one_attention_factor_for_both_tables(geometry: RopeGeometry, expected: float) -> None:
    for length in (geometry.original_length, geometry.original_length + 1):
        assert SCHEMES["longrope"](geometry, 2.0, length).attention_factor == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("length", [2048, 2049])
@pytest.mark.parametrize("scheme", ["default", "yarn"])
def test_longrope_is_refused_by_a_model_without_its_tables(scheme: str, length: int) -> None:
    options = {"short_factor": (1.0,) * 32, "long_factor": (2.0,) * 32}  # of another scheme's block
    geometry = RopeGeometry(64, 1e4, 2048, 2048, scheme, parameters=options)
    with pytest.raises(UnsupportedModelError, match=r"'longrope' needs a .* table"):
        SCHEMES["longrope"](geometry, 2.0, length)


def test_a_model_runs_every_scheme_but_those_whose_numbers_it_lacks() -> None:
    plain = RopeGeometry(rotary_dim=64, theta=1e4, original_length=2048, native_length=2048)
    common = SCHEMES.keys() - {"longrope", "clex"}
    assert schemes_for(plain) == tuple(sorted(common))
    assert set(schemes_for(longrope())) == common | {"longrope"}
    assert set(schemes_for(longrope().unscaled())) == common | {"longrope"}
    assert set(schemes_for(replace(plain, scheme="clex"))) == common | {"clex"}


def test_longrope_has_its_numbers_without_being_the_native_plan() -> None:
    """Where a scaling block is a ceiling, the native plan is unscaled and the block's scheme is one among others."""
    for length in (4096, 16384):
        native = SCHEMES["longrope"](longrope(), 4.0, length)
        other = SCHEMES["longrope"](longrope().unscaled(), 4.0, length)
        assert other.inv_freq.tolist() == native.inv_freq.tolist()
        assert other.attention_factor == native.attention_factor > 1
