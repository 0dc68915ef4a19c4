"""Tiny random models of each supported architecture under the engine against transformers, in float32."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from model_patches.loading.checkpoint import SUPPORTED_ARCHITECTURES
from model_patches.rope_config import read_geometry
from service.core import SamplingParams
from service.scaling.policy import Policy, RopeWish
from tests.reference.harness import RealEngine, assert_like_reference

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
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
}
REQUESTS = [
    ("short", 3, None),
    ("one page", 16, None),
    ("chunked", 50, None),
    ("beyond native", 100, None),
    ("far beyond native", 200, None),
    ("yarn 2 on a short prompt", 20, RopeWish(factor=2.0)),
    ("linear 4", 30, RopeWish(scheme="linear", factor=4.0)),
    ("ntk 2", 70, RopeWish(scheme="ntk", factor=2.0)),
]


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
    tested = {type(tiny(config)).__name__ for config in FAMILIES.values()}
    assert tested == set(SUPPORTED_ARCHITECTURES)
