"""The embedded model under the engine against transformers on the same weights, in float32."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model_patches.loading.load import LoadedModel, load_model
from model_patches.plan import PositionPlan
from model_patches.rope_config import read_geometry
from service.scaling.policy import Policy, RopeWish
from tests.reference.harness import RealEngine, assert_like_exact, assert_like_reference, reference_logits
from tests.reference.text import real_text

LENGTHS = [1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 100, 128, 200, 256, 300, 511, 513, 1000, 2000]
MAX_TOKENS = 12
logger = logging.getLogger(__name__)


def load(folder: Path) -> LoadedModel:
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


class Float64Norm(nn.Module):
    """RMSNorm in float64: transformers' own goes through float32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.epsilon) * self.weight
        return normalized


@pytest.fixture(scope="module")
def reference(embedded_model_folder: Path) -> Any:
    return load(embedded_model_folder).model


@pytest.fixture(scope="module")
def exact_reference(embedded_model_folder: Path) -> Any:
    """In float64, save for cos and sin, which the rounding to float32 is part of.

    Where a text begins, single numbers of this model are huge: transformers in float32 is off by up to 3e-4 itself.
    """
    model = load(embedded_model_folder).model.double()
    for name, module in [*model.named_modules()]:
        if name.endswith("norm"):
            model.set_submodule(name, Float64Norm(module))
    return model


@pytest.fixture(scope="module")
def tokens(embedded_model_folder: Path) -> list[int]:
    tokenizer = load(embedded_model_folder).tokenizer
    return list(tokenizer.backend_tokenizer.encode(real_text()[:60_000], add_special_tokens=False).ids)


@pytest.mark.parametrize("fuse", [False, True])
def test_greedy_text_of_20_prompts_batched_and_chunked_is_that_of_transformers(
    embedded_model_folder: Path, reference: Any, exact_reference: Any, tokens: list[int], fuse: bool
) -> None:
    loaded = load(embedded_model_folder)
    engine = RealEngine(loaded.model, Policy(read_geometry(loaded.config)), fuse=fuse)
    for number, length in enumerate(LENGTHS):
        engine.add(f"{length}", tokens[400 * number : 400 * number + length], MAX_TOKENS)
    engine.run()
    assert max(len(step) for step in engine.runner.steps) > 8
    assert len([step for step in engine.runner.steps if "2000" in step]) > 8
    for length in LENGTHS:
        # Fused layers sum in blocks. The products of others are torch's, so that they err where transformers does.
        tolerance, times = (2e-4, 1) if fuse else (1e-4, 2)
        assert_like_exact(engine, exact_reference, reference, f"{length}", tolerance, times)


@pytest.mark.parametrize(("factor", "length"), [(2.0, 400), (4.0, 900)])
def test_static_yarn_gives_the_logits_of_a_transformers_model_whose_config_carries_it(
    embedded_model_folder: Path, reference: Any, tokens: list[int], factor: float, length: int
) -> None:
    native_length = 256
    loaded = load(embedded_model_folder)
    engine = RealEngine(loaded.model, Policy(read_geometry(loaded.config), native_length=native_length))
    plan = engine.add("short beside", tokens[:100], MAX_TOKENS).choice.plan
    assert (plan.scheme, plan.factor) == ("default", 1.0)
    plan = engine.add("long", tokens[:length], MAX_TOKENS, RopeWish(factor=factor)).choice.plan
    assert (plan.scheme, plan.factor) == ("yarn", factor)
    engine.run()
    assert_like_reference(engine, reference, "short beside")

    assert_like_reference(engine, scaled_by_config(reference, plan, native_length), "long")


@pytest.mark.long
def test_a_prompt_of_12000_tokens_gives_the_logits_of_a_transformers_model_whose_config_carries_its_plan(
    embedded_model_folder: Path, reference: Any, tokens: list[int]
) -> None:
    loaded = load(embedded_model_folder)
    engine = RealEngine(loaded.model, Policy(read_geometry(loaded.config)), max_batch_tokens=512)
    plan = engine.add("long", tokens[:12_000], 4).choice.plan
    assert (plan.scheme, plan.factor) == ("yarn", 1.5)
    engine.run()
    assert_like_reference(engine, scaled_by_config(reference, plan, 8192), "long")


def scaled_by_config(reference: Any, plan: PositionPlan, original_length: int) -> Any:
    """The same weights under a config that carries a plan; transformers' own numbers for it are checked."""
    config = reference.config.__class__.from_dict(reference.config.to_dict())
    config.rope_parameters = {
        "rope_type": plan.scheme,
        "rope_theta": reference.config.rope_parameters["rope_theta"],
        "factor": plan.factor,
        "original_max_position_embeddings": original_length,
    }
    scaled = type(reference)(config).eval()
    scaled.load_state_dict(reference.state_dict())
    rotary = scaled.model.rotary_emb
    torch.testing.assert_close(torch.tensor(plan.inv_freq, dtype=torch.float32), rotary.inv_freq, rtol=1e-6, atol=0)
    assert plan.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-6)
    return scaled


def test_difference_to_stock_transformers_is_reported(reference: Any, tokens: list[int]) -> None:
    config = reference.config
    policy = Policy(read_geometry(config.to_dict()))
    for length in (512, 2000):
        ours = reference_logits(reference, policy.choose(length, 1).plan, tokens[:length], 0)
        with torch.inference_mode():
            stock = reference(torch.tensor([tokens[:length]]), use_cache=False).logits[0]
        difference = float((ours - stock).abs().max())
        logger.warning("float64 against stock transformers' float32 angles, %d tokens: %.1e", length, difference)
        assert difference > 0
