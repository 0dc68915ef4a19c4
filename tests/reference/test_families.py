"""Tiny random models of each supported architecture under the engine against transformers, in float32."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from model_patches.kernels import build
from model_patches.loading.checkpoint import SUPPORTED_ARCHITECTURES
from model_patches.rope_config import read_geometry
from service.core import SamplingParams
from service.scaling.policy import Policy, RopeWish
from tests.reference.growing import tiny
from tests.reference.harness import RealEngine, assert_like_reference, assert_like_stock
from tests.reference.supported import FAMILIES, SCALED, configs

REQUESTS = [
    ("short", 3, None),
    ("one page", 16, None),
    ("all of the native length", 40, None),
    ("beyond native", 100, None),
    ("far beyond native", 200, None),
    ("yarn 2 on a short prompt", 20, RopeWish(factor=2.0)),
    ("linear 4", 30, RopeWish(scheme="linear", factor=4.0)),
    ("ntk 2", 70, RopeWish(scheme="ntk", factor=2.0)),
]

FLOAT32_ANGLES = 1e-5  # how far logits may move because stock transformers computes angles in float32; 6e-7 here
SCALED_LENGTHS = (3, 16, 40, 100, 200)


@pytest.fixture(autouse=True, scope="module")
def attention_by_operators() -> None:
    """Also models that do not run fused attend by the C++ operators here, where there is a compiler."""
    build.load()


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_plans_in_one_batch_give_each_request_the_logits_it_has_alone(family: str) -> None:
    config = FAMILIES[family]
    engine = RealEngine(tiny(config), Policy(read_geometry(config.to_dict())), max_batch_tokens=48)
    generator = torch.Generator().manual_seed(1)
    for name, length, wish in REQUESTS:
        engine.add(name, torch.randint(128, (length,), generator=generator).tolist(), 24, wish)
    engine.run()
    plans = {name: engine.sequences[name].choice.plan for name, _, _ in REQUESTS}
    assert max(len({plans[name] for name in step}) for step in engine.runner.steps) >= 4
    reference = tiny(config)
    for name, _, _ in REQUESTS:
        assert_like_reference(engine, reference, name)


@dataclass(frozen=True)
class Run:
    """An engine that has served a scaled model's requests, each named by its prompt's length, and the model again."""

    engine: RealEngine
    reference: Any


@pytest.fixture(scope="module", params=SCALED)
def run(request: pytest.FixtureRequest) -> Run:
    config = SCALED[request.param]
    engine = RealEngine(tiny(config), Policy(read_geometry(config.to_dict(), "config")), max_batch_tokens=48)
    generator = torch.Generator().manual_seed(1)
    for length in SCALED_LENGTHS:
        engine.add(f"{length}", torch.randint(128, (length,), generator=generator).tolist(), 24)
    engine.run()
    return Run(engine, tiny(config))


def test_a_model_with_scaling_of_its_own_gives_each_request_the_logits_it_has_alone(run: Run) -> None:
    sequences = run.engine.sequences
    plans = [{sequences[name].choice.plan for name in step} for step in run.engine.runner.steps]
    assert max(map(len, plans)) == (2 if run.reference.config.rope_parameters["rope_type"] == "longrope" else 1)
    for length in SCALED_LENGTHS:
        assert_like_reference(run.engine, run.reference, f"{length}")


def test_a_model_with_scaling_of_its_own_gives_what_stock_transformers_gives_for_one_sequence(run: Run) -> None:
    for length in SCALED_LENGTHS:
        assert_like_stock(run.engine, run.reference, f"{length}", FLOAT32_ANGLES)


def test_every_way_of_sampling_works_on_the_logits_of_a_real_model() -> None:
    config = FAMILIES["llama"]
    engine = RealEngine(tiny(config), Policy(read_geometry(config.to_dict())))
    everything = frozenset(range(128))
    ways = {
        "greedy": SamplingParams(max_tokens=8, temperature=0.0),
        "sampled": SamplingParams(max_tokens=8, seed=1),
        "filtered": SamplingParams(max_tokens=8, top_k=20, top_p=0.9, min_p=0.01, seed=2),
        "no end yet": SamplingParams(max_tokens=8, min_tokens=4, end_token_ids=everything - {5}, temperature=0.0),
    }
    for name, sampling in ways.items():
        engine.add(name, [1, 2, 3], 8, sampling=sampling)
    engine.run()
    lengths = {name: len(engine.sequences[name].output) for name in ways}
    assert lengths == {"greedy": 8, "sampled": 8, "filtered": 8, "no end yet": 5}
    assert engine.sequences["no end yet"].output[:4] == [5, 5, 5, 5]


def test_every_supported_architecture_is_tested_here() -> None:
    tested = {type(tiny(config)).__name__ for config in configs()}
    assert tested == set(SUPPORTED_ARCHITECTURES)
