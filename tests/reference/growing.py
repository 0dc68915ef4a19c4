"""The engine over tiny real models, with what growth and the prefix cache can be set to."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.reference.harness import RealEngine

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


def tiny(config: Any) -> Any:
    """A model of random weights, the same for every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@dataclass
class GrowingRealEngine(RealEngine):
    """`RealEngine` with small pages and small steps."""

    page_size: int = 4
    max_running: int = 8
    max_batch_tokens: int = 64
