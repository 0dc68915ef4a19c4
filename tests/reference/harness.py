"""The engine over a real transformers model, with every row of logits recorded, and the reference to hold it against.

The reference is transformers' own model with its own attention, one sequence at a time, without a cache; only its
rotary module is replaced by one that computes angles in float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import nn

from model_patches.attention import KeyValuePages
from model_patches.patch import PatchedModel
from model_patches.plan import PositionPlan
from service.cache.pages import PageAllocator
from service.cache.pool import CacheShape, allocate_pool
from service.core import SamplingParams, Sequence
from service.engine.engine import Engine
from service.engine.runner import ModelRunner
from service.metrics import Metrics
from service.scaling.policy import Policy, RopeWish
from service.scheduler.scheduler import Scheduler
from tests.fakes import ByteStream


class Float64Rotary(nn.Module):
    """cos and sin as the formula says: angles position × frequency in float64, rounded once."""

    frequencies: torch.Tensor

    def __init__(self, plan: PositionPlan) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.tensor(plan.inv_freq, dtype=torch.float64), persistent=False)
        self.attention_factor = plan.attention_factor

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids.double().unsqueeze(-1) * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return cos.float().to(x.dtype), sin.float().to(x.dtype)


@torch.inference_mode()
def reference_logits(model: Any, plan: PositionPlan, tokens: list[int], start: int) -> torch.Tensor:
    """Logits that follow tokens[start:], one row each, by transformers under a plan; the model is left as it was."""
    original = model.model.rotary_emb
    model.model.rotary_emb = Float64Rotary(plan).to(model.device)
    try:
        output = model(torch.tensor([tokens], device=model.device), logits_to_keep=len(tokens) - start, use_cache=False)
    finally:
        model.model.rotary_emb = original
    logits: torch.Tensor = output.logits[0]
    return logits.float()


class RecordingRunner(ModelRunner):
    """Keeps each sequence's rows of logits, in order."""

    def __init__(self, model: PatchedModel, layers: list[KeyValuePages]) -> None:
        super().__init__(model, layers)
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.steps: list[dict[str, int]] = []

    def forward(self, step: Mapping[Sequence, int]) -> torch.Tensor:
        logits = super().forward(step)
        self.steps.append({sequence.request_id: tokens for sequence, tokens in step.items()})
        ready = [s for s, tokens in step.items() if s.num_computed + tokens == s.num_tokens]
        for sequence, row in zip(ready, logits, strict=True):
            self.rows.setdefault(sequence.request_id, []).append(row.clone())
        return logits


@dataclass
class RealEngine:
    """An engine on a real model. The model is patched in place: hand over one that nothing else uses."""

    model: Any
    policy: Policy
    max_batch_tokens: int = 256
    num_pages: int = 1024
    page_size: int = 16
    sequences: dict[str, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        patched = PatchedModel(self.model, self.policy.geometry.rotary_dim)
        shape = CacheShape(patched.layers, self.page_size, patched.kv_heads, patched.head_dim, patched.dtype)
        self.pages = PageAllocator(self.num_pages, self.page_size)
        self.runner = RecordingRunner(patched, allocate_pool(shape, self.num_pages, patched.device))
        scheduler = Scheduler(self.pages, max_running=32, max_batch_tokens=self.max_batch_tokens)
        self.engine = Engine(
            self.runner, scheduler, ByteStream, Metrics(CollectorRegistry()), page_bytes=shape.page_bytes
        )

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        wish: RopeWish | None = None,
        sampling: SamplingParams | None = None,
    ) -> Sequence:
        """Admit a request: greedy and of exactly max_tokens tokens, unless `sampling` says otherwise."""
        choice = self.policy.choose(len(prompt), max_tokens, wish)
        sampling = sampling or SamplingParams(max_tokens=max_tokens, temperature=0.0)
        sequence = Sequence(request_id, prompt, choice, sampling, deliver=lambda _: None)
        self.sequences[request_id] = sequence
        self.engine.add(sequence)
        return sequence

    def run(self) -> None:
        """Step until all have ended; the pool is whole afterwards."""
        while self.engine.step():
            pass
        assert self.pages.num_used == 0
        self.pages.check()

    def logits(self, request_id: str) -> torch.Tensor:
        """What each generated token was chosen from, [tokens, vocabulary]."""
        return torch.stack(self.runner.rows[request_id])


def assert_like_reference(engine: RealEngine, reference: Any, request_id: str, tolerance: float = 1e-4) -> None:
    """Logits within the tolerance; each token the reference's own choice, unless its margin is below the error."""
    sequence, logits = engine.sequences[request_id], engine.logits(request_id)
    tokens = sequence.prompt + sequence.output[:-1]
    expected = reference_logits(reference, sequence.choice.plan, tokens, len(sequence.prompt) - 1)
    error = (logits - expected).abs().amax(dim=-1)
    assert float(error.max()) <= tolerance, f"{request_id}: logits differ by {float(error.max()):.2e}"
    best, second = expected.topk(2, dim=-1).values.unbind(dim=-1)
    for place, token in enumerate(sequence.output):
        if token != int(expected[place].argmax()):
            assert float(best[place] - second[place]) <= 2 * float(error[place]), f"{request_id}: token {place} differs"
