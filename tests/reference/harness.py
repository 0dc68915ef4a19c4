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

from model_patches.pages import KeyValuePages
from model_patches.patch import PatchedModel
from model_patches.plan import PositionPlan
from model_patches.recorded import Recorder
from service.cache.groups import LayerGroup, group_layers, layers_of_a_page
from service.cache.pages import PageAllocator
from service.cache.pool import CacheShape, allocate_pool
from service.core import SamplingParams, Sequence
from service.engine.engine import Engine
from service.engine.runner import ModelRunner
from service.metrics import Metrics
from service.scaling.fixed import AnyPolicy
from service.scaling.policy import RopeWish
from service.scheduler.scheduler import Scheduler
from tests.fakes import ByteStream


class Float64Rotary(nn.Module):
    """cos and sin as the formula says: angles position × frequency in float64, rounded once."""

    frequencies: torch.Tensor

    def __init__(
        self, plan: PositionPlan, columns: int, local_theta: float | None = None, *, adjacent: bool = False
    ) -> None:
        """Give so many columns: one for each rotated dimension, or for each pair; in windowed layers with a base of
        their own, unscaled. A pair's two columns are half of all apart, or adjacent."""
        super().__init__()
        self.columns = columns
        self.adjacent = adjacent
        self.local_theta = local_theta
        self.register_buffer("frequencies", torch.tensor(plan.inv_freq, dtype=torch.float64), persistent=False)
        self.attention_factor = plan.attention_factor

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies, factor = self.frequencies, self.attention_factor
        if layer_type == "sliding_attention" and self.local_theta is not None:
            steps = torch.arange(0, self.columns, 2, dtype=torch.float64) / self.columns
            frequencies, factor = self.local_theta**-steps, 1.0
        angles = position_ids.double().unsqueeze(-1) * frequencies
        angles = torch.stack([angles, angles], dim=-1 if self.adjacent else -2).flatten(-2)[..., : self.columns]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return cos.float().to(x.dtype), sin.float().to(x.dtype)


def reference_logits(model: Any, plan: PositionPlan, tokens: list[int], start: int) -> torch.Tensor:
    """Logits that follow tokens[start:], one row each, by transformers under a plan; the model is left as it was."""
    original = model.base_model.rotary_emb
    model.base_model.rotary_emb = float64_rotary(model, plan, original)
    try:
        return stock_logits(model, tokens, start)
    finally:
        model.base_model.rotary_emb = original


def float64_rotary(model: Any, plan: PositionPlan, original: Any) -> Float64Rotary:
    """What takes the place of a model's own rotary module, with columns like those of that."""
    local = model.config.rope_parameters.get("sliding_attention")
    layer_type = () if local is None else ("full_attention",)
    cos, _sin = original(torch.zeros(1, device=model.device), torch.ones(1, 1, device=model.device), *layer_type)
    adjacent = bool((cos[..., 0] == cos[..., 1]).all())
    local_theta = None if local is None else local["rope_theta"]
    return Float64Rotary(plan, cos.shape[-1], local_theta, adjacent=adjacent).to(model.device)


@torch.inference_mode()
def stock_logits(model: Any, tokens: list[int], start: int) -> torch.Tensor:
    """The same by transformers alone: its own rotary module, whose angles are float32, under the model's own config."""
    output = model(torch.tensor([tokens], device=model.device), logits_to_keep=len(tokens) - start, use_cache=False)
    logits: torch.Tensor = output.logits[0]
    return logits.float()


class RecordingRunner(ModelRunner):
    """Keeps each sequence's rows of logits, in order; those after guesses that turn out wrong among them."""

    def __init__(self, model: PatchedModel, pool: list[KeyValuePages], groups: tuple[LayerGroup, ...] = ()) -> None:
        super().__init__(model, pool, groups)
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.steps: list[dict[str, int]] = []

    def forward(self, step: Mapping[Sequence, int]) -> torch.Tensor:
        logits = super().forward(step)
        self.steps.append({sequence.request_id: tokens for sequence, tokens in step.items()})
        last = (s for s, tokens in step.items() if s.num_computed + tokens >= s.num_tokens)
        ready = [s for s in last for _ in range(1 + len(s.draft))]
        for sequence, row in zip(ready, logits, strict=True):
            self.rows.setdefault(sequence.request_id, []).append(row.clone())
        return logits


@dataclass
class RealEngine:
    """An engine on a real model. The model is patched in place: hand over one that nothing else uses."""

    model: Any
    policy: AnyPolicy
    max_batch_tokens: int = 256
    num_pages: int = 1024
    page_size: int = 16
    kv_dtype: torch.dtype | None = None
    max_running: int = 32
    prefix_caching: bool = True
    refresh_tokens: int = 0
    fuse: bool = True
    record: Recorder | None = None
    max_draft: int = 0
    sequences: dict[str, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        patched = PatchedModel(self.model, self.policy.positions, fuse=self.fuse)
        limits = {"max_batch_tokens": self.max_batch_tokens, "refresh_tokens": self.refresh_tokens}
        self.groups = group_layers(patched.windows, self.page_size, self.policy.max_length, **limits)
        shape = CacheShape(
            layers=layers_of_a_page(self.groups),
            page_size=self.page_size,
            kv_heads=patched.kv_heads,
            key_dim=patched.key_dim,
            value_dim=patched.value_dim,
            dtype=self.kv_dtype or patched.dtype,
        )
        self.pages = PageAllocator(self.num_pages, self.page_size)
        pool = allocate_pool(shape, self.num_pages + (self.record is not None), patched.device)
        self.runner = RecordingRunner(patched, pool, self.groups)
        if self.record is not None:
            self.runner.record_decoding(self.policy.max_length, self.max_running, self.record)
        self.scheduler = Scheduler(
            self.pages,
            max_running=self.max_running,
            prefix_caching=self.prefix_caching,
            windows=[group.window for group in self.groups],
            **limits,
        )
        self.engine = Engine(
            *(self.runner, self.scheduler, ByteStream, Metrics(CollectorRegistry()), shape.page_bytes),
            max_draft=self.max_draft,
            max_rows_with_drafts=self.max_batch_tokens,
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
    _assert_like(engine, request_id, logits_of(reference, engine, request_id), tolerance)


def assert_like_exact(
    engine: RealEngine, exact: Any, inexact: Any, request_id: str, tolerance: float, times_inexact: float
) -> None:
    """The same against a reference in float64, or at most so many times as far from it as one in float32 is."""
    expected = logits_of(exact, engine, request_id)
    if float((engine.logits(request_id) - expected).abs().max()) > tolerance:
        own = float((logits_of(inexact, engine, request_id) - expected).abs().max())
        tolerance = max(tolerance, times_inexact * own)
    _assert_like(engine, request_id, expected, tolerance)


def logits_of(reference: Any, engine: RealEngine, request_id: str) -> torch.Tensor:
    """A reference's logits for the tokens of a request, from the one that its first token was chosen from."""
    sequence = engine.sequences[request_id]
    tokens = sequence.prompt + sequence.output[:-1]
    return reference_logits(reference, sequence.choice.plan, tokens, len(sequence.prompt) - 1)


def assert_like_stock(engine: RealEngine, reference: Any, request_id: str, tolerance: float) -> None:
    """The same against `stock_logits`."""
    sequence = engine.sequences[request_id]
    tokens = sequence.prompt + sequence.output[:-1]
    _assert_like(engine, request_id, stock_logits(reference, tokens, len(sequence.prompt) - 1), tolerance)


def _assert_like(engine: RealEngine, request_id: str, expected: torch.Tensor, tolerance: float) -> None:
    sequence, logits = engine.sequences[request_id], engine.logits(request_id)
    error = (logits - expected).abs().amax(dim=-1)
    assert float(error.max()) <= tolerance, f"{request_id}: logits differ by {float(error.max()):.2e}"
    best, second = expected.topk(2, dim=-1).values.unbind(dim=-1)
    for place, token in enumerate(sequence.output):
        if token != int(expected[place].argmax()):
            assert float(best[place] - second[place]) <= 2 * float(error[place]), f"{request_id}: token {place} differs"
