"""Dynamic YaRN is YaRN at the ratio of the lengths, and the default up to the original length."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_patches.geometry import RopeGeometry
from model_patches.schemes import SCHEMES

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "beta_fast": st.floats(min_value=8, max_value=64),
        "beta_slow": st.floats(min_value=0.5, max_value=4),
        "truncate": st.booleans(),
        "attention_factor": st.none() | st.floats(min_value=0.5, max_value=2),
        "mscale": st.floats(min_value=0, max_value=2),
        "mscale_all_dim": st.floats(min_value=0, max_value=2),
    },
)
LENGTHS = st.integers(min_value=256, max_value=200_000)


def geometry(scheme: str, original: int = 4096, **options: Any) -> RopeGeometry:
    return RopeGeometry(64, 1e5, original, original, scheme, parameters=options)


@settings(deadline=None)
@given(options=OPTIONS, original=LENGTHS, length=LENGTHS, asked=st.floats(min_value=1, max_value=64))
def test_it_is_yarn_at_the_ratio_of_lengths(options: dict[str, Any], original: int, length: int, asked: float) -> None:
    dynamic = SCHEMES["dynamic-yarn"](geometry("dynamic-yarn", original, **options), asked, length)
    yarn = SCHEMES["yarn"](geometry("yarn", original, **options), max(1.0, length / original), 1)
    assert dynamic.inv_freq.tolist() == yarn.inv_freq.tolist()
    assert dynamic.attention_factor == yarn.attention_factor


@pytest.mark.parametrize(("length", "stretch"), [(8192, 2.0), (6144, 1.5), (4097, 4097 / 4096), (131072, 32.0)])
def test_attention_is_sharpened_by_the_length(length: int, stretch: float) -> None:
    dynamic = SCHEMES["dynamic-yarn"](geometry("default"), 1.0, length)
    assert dynamic.attention_factor == pytest.approx(0.1 * np.log(stretch) + 1, rel=1e-14)
    default = SCHEMES["default"](geometry("default"), 1.0, length)
    assert default.inv_freq[-1] / dynamic.inv_freq[-1] == pytest.approx(stretch, rel=1e-12)


@pytest.mark.parametrize("scheme", ["default", "yarn", "dynamic"])
def test_the_options_of_another_block_are_not_its_own(scheme: str) -> None:
    other = geometry(scheme, beta_fast=4, truncate=False, attention_factor=0.5, factor=8.0)
    plain = geometry("default")
    assert SCHEMES["dynamic-yarn"](other, 1.0, 9000).inv_freq.tolist() == (
        SCHEMES["dynamic-yarn"](plain, 1.0, 9000).inv_freq.tolist()
    )
    assert SCHEMES["dynamic-yarn"](other, 1.0, 9000).attention_factor != 0.5
