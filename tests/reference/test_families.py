"""Tiny random models of each supported architecture under the engine against transformers, in float32."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from model_patches.loading.checkpoint import SUPPORTED_ARCHITECTURES
from model_patches.rope_config import read_geometry
from service.core import SamplingParams
from service.scaling.policy import Policy, RopeWish
from tests.reference.harness import RealEngine, assert_like_reference, assert_like_stock

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "llama, one key head a query head": LlamaConfig(**{**SHAPE, "num_key_value_heads": 6}),
    "llama, head_dim of its own": LlamaConfig(**SHAPE, head_dim=16),
    "mistral, no window": MistralConfig(**SHAPE, sliding_window=None),
    "mistral, window of 20": MistralConfig(**SHAPE, sliding_window=20),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "phi3": Phi3Config(**SHAPE),
    "glm4, interleaved": Glm4Config(**{**SHAPE, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}, head_dim=8),
    "glm4, interleaved, half of each head": Glm4Config(
        **{**SHAPE, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, head_dim=16
    ),
    "gemma3, windows with a base of their own": Gemma3TextConfig(
        **{
            **SHAPE,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        head_dim=16,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
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


def scaled(rope_type: str, **options: Any) -> dict[str, Any]:
    """The shape of a model that its config stretches from 64 tokens to 256."""
    rope = {**ROPE, "rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 64, **options}
    return {**SHAPE, "max_position_embeddings": 256, "rope_parameters": rope}


TABLES = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 2.0, 3.5, 4.5]}
SINKS: dict[str, Any] = {"head_dim": 16, "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "first_k_dense_replace": 1},
}
SCALED = {
    "llama, llama3": LlamaConfig(**scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama, linear": LlamaConfig(**{**scaled("linear"), "max_position_embeddings": 64}),
    "llama, yarn with mscale": LlamaConfig(**scaled("yarn", mscale=1.0, mscale_all_dim=0.7)),
    "mistral, yarn, window of 20": MistralConfig(**scaled("yarn"), sliding_window=20),
    "qwen2, yarn": Qwen2Config(**scaled("yarn")),
    "qwen3, yarn": Qwen3Config(**scaled("yarn"), head_dim=16),
    "phi3, longrope": Phi3Config(**scaled("longrope", **TABLES), original_max_position_embeddings=64),
    "glm4, yarn, half of each head": Glm4Config(**scaled("yarn", partial_rotary_factor=0.5), head_dim=16),
    "gpt-oss, yarn without truncation": GptOssConfig(**{**scaled("yarn", truncate=False), **SINKS}),
    "deepseek-v3, yarn with mscale": DeepseekV3Config(**{**scaled("yarn", mscale=1.0, mscale_all_dim=1.0), **LATENT}),
}
FLOAT32_ANGLES = 1e-5  # how far logits may move because stock transformers computes angles in float32; 6e-7 here
SCALED_LENGTHS = (3, 16, 40, 100, 200)


def tiny(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


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
    tested = {type(tiny(config)).__name__ for config in [*FAMILIES.values(), *SCALED.values()]}
    assert tested == set(SUPPORTED_ARCHITECTURES)
