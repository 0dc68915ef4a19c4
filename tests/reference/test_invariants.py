"""What runs beside a request, or ran before it, changes none of its bits."""

from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from model_patches.loading.load import load_model
from model_patches.rope_config import read_geometry
from service.core import PageTable, SamplingParams, Sequence
from service.scaling.policy import Policy
from tests.reference.harness import RealEngine

NATIVE_LENGTH = 128


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def engine(embedded_model_folder: Path, request: pytest.FixtureRequest) -> RealEngine:
    loaded = load_model(embedded_model_folder, dtype=request.param, device=torch.device("cpu"))
    return RealEngine(loaded.model, Policy(read_geometry(loaded.config), native_length=NATIVE_LENGTH))


def sequence(engine: RealEngine, prompt_tokens: int, seed: int, computed: int = 0) -> Sequence:
    """A sequence with pages, of which `computed` tokens have been run already."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(100, 40000, (prompt_tokens,), generator=generator).tolist()
    choice = engine.policy.choose(prompt_tokens, 8)
    made = Sequence(f"{seed}", prompt, choice, SamplingParams(max_tokens=8), deliver=lambda _: None)
    made.tables = [PageTable(0, engine.pages.allocate(engine.scheduler.needs.pages_for(prompt_tokens + 8)))]
    if computed:
        engine.runner.forward({made: computed})
        made.num_computed = computed
    return made


def logits_beside(engine: RealEngine, partner: Sequence) -> torch.Tensor:
    """A short request's logits, prefilled in 40 tokens and decoded over 3, in steps that it shares with a partner of
    which 24 tokens and then 1, 1 and 1 are computed."""
    short = sequence(engine, 40, seed=7)
    rows = []
    for tokens, partner_tokens in ((40, 24), (1, 1), (1, 1), (1, 1)):
        logits = engine.runner.forward({short: tokens, partner: partner_tokens})
        rows.append(logits[0])
        for ran, count in ((short, tokens), (partner, partner_tokens)):
            ran.num_computed += count
            ran.output.append(1000 + ran.num_computed)
    for ran in (short, partner):
        engine.pages.release(ran.tables[0].pages)
    return torch.stack(rows)


def test_a_short_request_is_bit_for_bit_the_same_before_beside_and_after_a_long_one(engine: RealEngine) -> None:
    before = logits_beside(engine, sequence(engine, 24, seed=1))
    long = sequence(engine, 400, seed=2, computed=376)
    assert long.choice.plan.factor > 1
    beside = logits_beside(engine, long)
    after = logits_beside(engine, sequence(engine, 24, seed=3))
    assert torch.equal(before, beside)
    assert torch.equal(before, after)


def test_inside_the_native_length_cos_and_sin_are_bit_for_bit_those_of_the_default_plan_alone(
    embedded_model_folder: Path,
) -> None:
    loaded = load_model(embedded_model_folder, dtype=torch.float32, device=torch.device("cpu"))
    policy = Policy(read_geometry(loaded.config), native_length=NATIVE_LENGTH)
    engine = RealEngine(loaded.model, policy)
    rotary = loaded.model.get_submodule("model.rotary_emb")
    native, yarn = policy.choose(100, 8).plan, policy.choose(400, 8).plan
    positions = torch.arange(100)
    x = torch.zeros(1)

    def tables(plans: list[int], positions: torch.Tensor) -> torch.Tensor:
        return torch.stack(rotary(x, torch.stack([positions, torch.tensor(plans)])[:, None]))

    native_row = engine.runner.model.plan_row(native)
    alone = tables([native_row] * 100, positions)
    yarn_row = engine.runner.model.plan_row(yarn)
    mixed = tables([native_row, yarn_row] * 100, positions.repeat_interleave(2))
    assert torch.equal(alone, tables([native_row] * 100, positions))
    assert torch.equal(alone, mixed[:, :, 0::2])
    assert not torch.equal(alone, mixed[:, :, 1::2])
    angles = positions.double()[:, None] * torch.tensor(native.inv_freq, dtype=torch.float64)
    expected = torch.stack([angles.cos().float(), angles.sin().float()]).repeat(1, 1, 2)
    assert torch.equal(alone[:, 0], expected)


def test_patching_one_model_leaves_the_library_and_other_models_alone(embedded_model_folder: Path) -> None:
    forwards = (LlamaRotaryEmbedding.forward, LlamaAttention.forward)
    other = load_model(embedded_model_folder, dtype=torch.float32, device=torch.device("cpu")).model
    tokens = torch.arange(1000, 1020)[None]
    with torch.inference_mode():
        before = other(tokens).logits
    loaded = load_model(embedded_model_folder, dtype=torch.float32, device=torch.device("cpu"))
    engine = RealEngine(loaded.model, Policy(read_geometry(loaded.config)))
    engine.add("a", list(range(1000, 1020)), 2)
    engine.run()
    with torch.inference_mode():
        after = other(tokens).logits
    assert torch.equal(before, after)
    assert (LlamaRotaryEmbedding.forward, LlamaAttention.forward) == forwards
