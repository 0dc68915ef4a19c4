"""Log-probabilities of prompts against transformers' own log-softmax, in float32: whole, in chunks, beside others."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import LlamaConfig

from model_patches.patch import PatchedModel
from model_patches.plan import PositionPlan
from model_patches.rope_config import read_geometry
from service.cache.pages import PageAllocator
from service.cache.pool import CacheShape, allocate_pool
from service.core import Event, PromptEvent, SamplingParams, Sequence, TokenEvent
from service.engine.engine import Engine
from service.engine.runner import ModelRunner
from service.metrics import Metrics
from service.scaling.policy import Policy, RopeWish
from service.scheduler.scheduler import Scheduler
from tests.fakes import ByteStream
from tests.reference.growing import SHAPE, tiny
from tests.reference.harness import reference_logits

TOLERANCE = 1e-4
NUM_PAGES, PAGE_SIZE, TOP = 512, 4, 5


@dataclass
class Told:
    """An engine on a tiny model, and what it tells of each request."""

    max_batch_tokens: int
    prefix_caching: bool = True
    events: dict[str, list[Event]] = field(default_factory=dict)
    sequences: dict[str, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = LlamaConfig(**SHAPE)
        self.reference = tiny(config)
        self.policy = Policy(read_geometry(config.to_dict()))
        model = PatchedModel(tiny(config), self.policy.geometry)
        shape = CacheShape(model.layers, PAGE_SIZE, model.kv_heads, model.key_dim, model.value_dim, torch.float32)
        scheduler = Scheduler(
            PageAllocator(NUM_PAGES, PAGE_SIZE),
            max_running=8,
            max_batch_tokens=self.max_batch_tokens,
            prefix_caching=self.prefix_caching,
        )
        runner = ModelRunner(model, allocate_pool(shape, NUM_PAGES, model.device))
        self.engine = Engine(runner, scheduler, ByteStream, Metrics(CollectorRegistry()), page_bytes=1)

    def add(self, name: str, prompt: list[int], *, max_tokens: int = 6, wish: RopeWish | None = None) -> PositionPlan:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=TOP, prompt_logprobs=TOP)
        choice = self.policy.choose(len(prompt), max_tokens, wish)
        self.events[name] = []
        sequence = self.sequences[name] = Sequence(name, prompt, choice, sampling, self.events[name].append)
        self.engine.add(sequence)
        return choice.plan

    def run(self) -> None:
        while self.engine.step():
            pass

    def tokens(self, name: str) -> list[TokenEvent]:
        """All that was told of tokens: the prompt's from its second on, then the output's."""
        told: list[TokenEvent] = []
        for event in self.events[name]:
            told += event.tokens if isinstance(event, PromptEvent) else ()
            told += [event] if isinstance(event, TokenEvent) else ()
        return told

    def assert_like_transformers(self, name: str, *, output: bool = True) -> None:
        """Prompt and output, as one text, under the plan that it began with."""
        sequence = self.sequences[name]
        text = sequence.prompt + (sequence.output if output else [])
        expected = reference_logits(self.reference, sequence.choice.plan, text[:-1], 0).log_softmax(dim=-1)
        told = self.tokens(name)[: len(text) - 1]
        assert [token.token_id for token in told] == text[1:]
        logprobs = torch.tensor([token.logprob for token in told])
        own = expected.gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
        torch.testing.assert_close(logprobs, own, rtol=0, atol=TOLERANCE)
        tops = torch.tensor([[value for _, value in token.top_logprobs] for token in told])
        torch.testing.assert_close(tops, expected.topk(TOP, dim=-1).values, rtol=0, atol=TOLERANCE)
        for token, row in zip(told, expected, strict=True):
            for likely, value in token.top_logprobs:
                assert value == pytest.approx(float(row[likely]), abs=TOLERANCE)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("budget", [8, 13, 64])
def test_prompts_of_any_length_beside_each_other(budget: int) -> None:
    told = Told(budget)
    for length in (1, 2, 7, 8, 33, 58):
        told.add(f"{length}", prompt_of(length, length))
    told.run()
    for name in told.sequences:
        told.assert_like_transformers(name)


@pytest.mark.parametrize("budget", [16, 256])
@pytest.mark.parametrize(("wish", "factor"), [(None, 2.0), (RopeWish(scheme="linear", factor=3.0), 3.0)])
def test_under_a_scaled_plan_beside_an_unscaled_one(budget: int, wish: RopeWish | None, factor: float) -> None:
    told = Told(budget)
    assert told.add("short", prompt_of(40, 1)).factor == 1
    assert told.add("long", prompt_of(100, 2), wish=wish).factor == factor
    told.run()
    told.assert_like_transformers("short")
    told.assert_like_transformers("long")


def test_what_is_cached_already_is_told_all_the_same() -> None:
    told, prompt = Told(16), prompt_of(50)
    for name in ("first", "second"):
        told.add(name, prompt)
        told.run()
        told.assert_like_transformers(name)


@pytest.mark.parametrize("growth", ["rerotate", "reprefill"])
def test_growth_leaves_what_was_told_of_the_prompt(growth: Any) -> None:
    told = Told(16)
    told.add("grows", prompt_of(60), max_tokens=60, wish=RopeWish(growth=growth))
    told.run()
    assert told.sequences["grows"].rung > 0
    assert len(told.tokens("grows")) == 59 + 60
    told.assert_like_transformers("grows", output=False)
