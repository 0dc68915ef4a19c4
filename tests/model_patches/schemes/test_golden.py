"""Every scheme agrees with the golden file, whose cases were checked against transformers' own functions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_patches.rope_config import read_geometry
from model_patches.schemes import SCHEMES

GOLDEN = Path(__file__).parents[2] / "golden" / "inv_freq.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
# The file has no case of these: the one is held against YaRN, the other against another solver.
ELSEWHERE = {"dynamic-yarn", "clex"}


def scheme_of(case: dict[str, Any]) -> str:
    return str(case["rope_parameters"]["rope_type"])


def test_every_scheme_has_its_cases() -> None:
    assert {scheme_of(case) for case in CASES} == SCHEMES.keys() - ELSEWHERE
    assert len(CASES) == 120


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_agrees_with_the_golden_file(case: dict[str, Any]) -> None:
    names = ("head_dim", "rope_theta", "max_position_embeddings", "rope_parameters")
    geometry = read_geometry({name: case[name] for name in names})
    factor = case["rope_parameters"].get("factor", 1.0)
    length = case["seq_len"] or geometry.native_length
    frequencies = SCHEMES[scheme_of(case)](geometry, factor, length)
    assert frequencies.inv_freq.dtype == np.float64
    np.testing.assert_allclose(frequencies.inv_freq, case["inv_freq"], rtol=1e-12)
    assert frequencies.attention_factor == pytest.approx(case["attention_factor"], rel=1e-12)
