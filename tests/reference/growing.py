"""The engine over tiny real models, with what growth and the prefix cache can be set to."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from service.core import Sequence
from tests.reference.harness import RealEngine
from tests.reference.unrotated import grown_logits
from tests.service.growing import history_at

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
    "pad_token_id": 0,
}


def tiny(config: Any, std: float = 0.2) -> Any:
    """A model of random weights with that standard deviation, the same for every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


@dataclass
class GrowingRealEngine(RealEngine):
    """`RealEngine` with small pages and small steps."""

    page_size: int = 4
    max_running: int = 8
    max_batch_tokens: int = 64


def random_tokens(count: int, seed: int = 1) -> list[int]:
    tokens: list[int] = torch.randint(128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def assert_like_unrotated(engine: RealEngine, reference: Any, sequence: Sequence) -> None:
    """Logits within 1e-4 of those of keys that were never rotated before they are read, and no re-rotation too many."""
    tokens = sequence.prompt + sequence.output[:-1]
    rungs = [rung for rung in sequence.choice.rungs if rung.max_length < len(tokens)]
    reached = [*rungs, sequence.choice.rungs[len(rungs)]]
    stages = [
        (min(rung.max_length, len(tokens)), history_at(sequence.choice, rung.max_length, engine.refresh_tokens))
        for rung in reached
    ]
    assert sequence.num_rerotations == len(reached) - 1 <= len(sequence.choice.rungs) - 1
    expected = grown_logits(reference, engine.runner.model.geometry.layout, tokens, len(sequence.prompt) - 1, stages)
    error = (engine.logits(sequence.request_id) - expected).abs().max()
    assert float(error) <= 1e-4, f"{sequence.request_id}: logits differ by {float(error):.2e}"
