"""The engine over tiny real models, with what growth and the prefix cache can be set to."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from service.engine.engine import Engine
from service.metrics import Metrics
from service.scheduler.scheduler import Scheduler
from tests.fakes import ByteStream
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
    """`RealEngine` with a step of at most `budget` tokens."""

    page_size: int = 4
    max_running: int = 8
    budget: int = 64
    prefix_caching: bool = True
    refresh_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scheduler = Scheduler(
            self.pages,
            max_running=self.max_running,
            max_batch_tokens=self.budget,
            prefix_caching=self.prefix_caching,
            refresh_tokens=self.refresh_tokens,
        )
        self.engine = Engine(self.runner, self.scheduler, ByteStream, Metrics(CollectorRegistry()), page_bytes=1)
