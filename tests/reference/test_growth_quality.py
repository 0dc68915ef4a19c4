"""How far growth moves the embedded model's answers on real text, with a native length that is cut down for speed."""

import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.growth import Cache, measure, passages
from model_patches.loading.load import load_model
from model_patches.patch import PatchedModel
from model_patches.plan import PositionPlan, make_plan
from model_patches.rope_config import read_geometry

LENGTH, SCORED = 512, 64


@pytest.mark.parametrize(("factor", "bound"), [pytest.param(1.25, 0.002, marks=pytest.mark.long), (2.0, 0.02)])
def test_a_growth_step_stays_close_to_a_fresh_prefill_and_stale_keys_do_not(
    embedded_model_folder: Path, factor: float, bound: float
) -> None:
    loaded = load_model(embedded_model_folder, dtype=torch.float32, device=torch.device("cpu"))
    geometry = read_geometry(loaded.config)
    cache = Cache(PatchedModel(loaded.model, geometry), LENGTH + SCORED)

    def plan(scheme: str, factor: float) -> PositionPlan:
        return make_plan(geometry, scheme, factor, LENGTH)

    texts = [tokens for tokens, _ in zip(passages(loaded.tokenizer, 4 * LENGTH), range(6), strict=False)]
    results = [
        result
        for tokens in texts
        for result in measure(
            cache, tokens, plan("default", 1.0), [plan("yarn", factor)], LENGTH, scored=SCORED, refreshed=[128]
        )
    ]
    mean = {name: statistics.mean(result[name] for result in results) for name in results[0]}
    assert mean["re-rotated kl"] <= bound
    assert mean["last 128 again kl"] < mean["re-rotated kl"]
    assert mean["stale kl"] > 10 * mean["re-rotated kl"]
