"""Tiny random models that grow under the engine, against models whose cache holds keys that were never rotated."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Glm4Config, LlamaConfig, Phi3Config

from model_patches.plan import PositionPlan
from model_patches.rope_config import read_geometry
from service.core import Sequence
from service.scaling.policy import Policy, RopeWish
from tests.reference.growing import SHAPE, GrowingRealEngine, assert_like_unrotated, random_tokens, tiny
from tests.reference.harness import reference_logits
from tests.reference.unrotated import UnrotatedCache, rotate

NATIVE_LENGTH = 18  # rungs of 18, 22, 27, 36, 45, 54 and 72 tokens; 18 is no multiple of the page size
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "llama, head_dim of its own": LlamaConfig(**SHAPE, head_dim=16),
    "phi3, half of each head": Phi3Config(
        **{**SHAPE, "rope_parameters": {**SHAPE["rope_parameters"], "partial_rotary_factor": 0.5}}
    ),
    "glm4, interleaved": Glm4Config(**{**SHAPE, "head_dim": 8, "partial_rotary_factor": 1.0}),
    "glm4, interleaved, half of each head": Glm4Config(**{**SHAPE, "head_dim": 16, "partial_rotary_factor": 0.5}),
}


def serving(config: Any, **settings: Any) -> GrowingRealEngine:
    return GrowingRealEngine(
        tiny(config), Policy(read_geometry(config.to_dict()), native_length=NATIVE_LENGTH), **settings
    )


PATHS = {
    "from 1 to 1.25": (12, 10, None),
    "from 1 to 4": (12, 60, None),
    "from 1 to 4, by ntk": (12, 60, RopeWish(scheme="ntk")),
    "from 1 to 4, by linear": (12, 60, RopeWish(scheme="linear")),
    "from a prompt of the native length": (18, 20, None),
    "from 1.5 to 4": (20, 50, RopeWish(factor=1.5, growth="rerotate")),
    "from 2 to 3, by ntk": (20, 30, RopeWish(scheme="ntk", factor=2.0, growth="rerotate")),
    "from 1.25 to 4, by linear": (20, 52, RopeWish(scheme="linear", factor=1.25, growth="rerotate")),
    "not at all": (5, 6, None),
}


@pytest.mark.parametrize("refresh_tokens", [0, 5])
@pytest.mark.parametrize("model", MODELS)
def test_logits_after_re_rotation_are_those_of_keys_that_were_never_rotated_before(
    model: str, refresh_tokens: int
) -> None:
    engine = serving(MODELS[model], refresh_tokens=refresh_tokens, max_running=16)
    sequences = [
        engine.add(name, random_tokens(length, seed), max_tokens, wish)
        for seed, (name, (length, max_tokens, wish)) in enumerate(PATHS.items())
    ]
    engine.run()
    assert max(len({sequence.num_rerotations for sequence in sequences}), 3) > 3
    reference = tiny(MODELS[model])
    for sequence in sequences:
        assert_like_unrotated(engine, reference, sequence)


def test_logits_would_differ_without_re_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serving(MODELS["llama"])
    sequence = engine.add("a", random_tokens(12), 20)
    monkeypatch.setattr(engine.runner, "rerotate", lambda _rerotation: None)
    engine.run()
    with pytest.raises(AssertionError, match="logits differ"):
        assert_like_unrotated(engine, tiny(MODELS["llama"]), sequence)


@pytest.mark.parametrize("model", MODELS)
def test_the_unrotated_reference_is_transformers_where_nothing_grows(model: str) -> None:
    reference = tiny(MODELS[model])
    policy = Policy(read_geometry(MODELS[model].to_dict()))
    plan, tokens = policy.choose(100, 8).plan, random_tokens(50)
    cache = UnrotatedCache(reference, policy.geometry.layout)
    logits = torch.cat([cache.forward(tokens[:30], plan), *(cache.forward([token], plan) for token in tokens[30:])])
    assert torch.allclose(logits, reference_logits(reference, plan, tokens, 0), atol=2e-5, rtol=0)


def keys_of(engine: GrowingRealEngine, sequence: Sequence, layer: int) -> torch.Tensor:
    """The cached keys of a sequence, [tokens, kv_heads, key_dim]: those that the layer needs still."""
    [table] = (t for group, t in zip(engine.groups, sequence.tables, strict=True) if layer in group.layers)
    keys = engine.runner.layers[layer].keys.load(torch.tensor(table.pages))
    return keys.flatten(0, 1)[: sequence.num_computed - table.first * engine.page_size]


@pytest.mark.parametrize("model", MODELS)
def test_keys_of_the_first_layer_are_those_of_a_fresh_prefill_at_every_rung(model: str) -> None:
    engine = serving(MODELS[model])
    layout = engine.runner.model.geometry.layout
    growing = engine.add("growing", random_tokens(12), 60)
    seen: list[PositionPlan] = []
    while growing.num_tokens < 71:
        before = growing.plan
        engine.engine.step()
        if growing.plan == before:
            continue
        seen.append(growing.plan)
        tokens = growing.tokens(0, growing.num_computed)
        wish = RopeWish(factor=growing.plan.factor, growth="stop")
        fresh = engine.add(f"fresh {len(seen)}", tokens, 1, wish)
        engine.engine.step()
        assert (fresh.num_prefix_tokens, fresh.output != []) == (0, True)
        cache = UnrotatedCache(tiny(MODELS[model]), layout)
        cache.forward(tokens, growing.plan)
        expected = rotate(cache.keys[0], torch.arange(len(tokens)), growing.plan, layout)
        error = (keys_of(engine, growing, 0)[: len(tokens)] - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) <= 1e-5
        deeper = rotate(cache.keys[2], torch.arange(len(tokens)), growing.plan, layout)
        assert float((keys_of(engine, growing, 2)[: len(tokens)] - deeper).norm()) > 1e-3  # their past is another
    assert seen == list(growing.choice.rungs[1:])
    engine.run()


def test_keys_of_the_first_layer_are_those_that_the_engine_prefills() -> None:
    engine = serving(MODELS["llama"])
    growing = engine.add("growing", random_tokens(12), 20)
    while growing.num_rerotations < 2:
        engine.engine.step()
    tokens = growing.tokens(0, growing.num_tokens - 1)
    fresh = engine.add("fresh", [*tokens, 1], 3, RopeWish(factor=growing.plan.factor, growth="stop"))
    grown = keys_of(engine, growing, 0)[: len(tokens)]
    engine.engine.step()
    prefilled = keys_of(engine, fresh, 0)[: len(tokens)]
    assert fresh.plan == growing.plan
    assert float(((grown - prefilled).norm(dim=-1) / prefilled.norm(dim=-1)).max()) <= 1e-5
    engine.run()


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("refresh_tokens", [0, 5])
@pytest.mark.parametrize("computed", [15, 18, 23, 40, 60])
def test_preempted_sequences_give_the_same_logits(computed: int, refresh_tokens: int, prefix_caching: bool) -> None:
    engine = serving(MODELS["llama"], refresh_tokens=refresh_tokens, prefix_caching=prefix_caching)
    sequence = engine.add("a", random_tokens(12), 60)
    while sequence.num_tokens <= computed:
        engine.engine.step()
    engine.scheduler._preempt_youngest({})
    engine.run()
    assert_like_unrotated(engine, tiny(MODELS["llama"]), sequence)


def test_sequences_that_share_pages_grow_apart() -> None:
    engine = serving(MODELS["llama"], num_pages=40)
    sequences = []
    for number, (length, max_tokens) in enumerate([(17, 30), (16, 44), (14, 9), (12, 60)]):
        prompt = [*random_tokens(12), *random_tokens(length - 12, seed=number + 2)]
        sequences.append(engine.add(str(number), prompt, max_tokens))
        engine.engine.step()
    engine.run()
    assert [(sequence.num_prefix_tokens or 0) >= 8 for sequence in sequences] == [False, True, True, True]
    reference = tiny(MODELS["llama"])
    for sequence in sequences:
        assert_like_unrotated(engine, reference, sequence)


def test_a_longrope_model_grows_from_its_short_table_to_its_long_one() -> None:
    rope = {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        **{"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 2.0, 3.5, 4.5]},
    }
    shape = {**SHAPE, "max_position_embeddings": 256, "rope_parameters": rope}
    config = Phi3Config(**shape, original_max_position_embeddings=64)
    engine = GrowingRealEngine(tiny(config), Policy(read_geometry(config.to_dict())))
    crossing = engine.add("crossing", random_tokens(50), 40)
    short = engine.add("short", random_tokens(10), 20)
    long = engine.add("long", random_tokens(70), 20)
    engine.run()
    assert [rung.max_length for rung in crossing.choice.rungs] == [64, 256]
    reference = tiny(config)
    for sequence in (crossing, short, long):
        assert_like_unrotated(engine, reference, sequence)
    assert [sequence.num_rerotations for sequence in (crossing, short, long)] == [1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_a_growing_request_the_logits_of_a_native_one_are_bit_for_bit_the_same(dtype: torch.dtype) -> None:
    def beside(wish: RopeWish) -> tuple[GrowingRealEngine, torch.Tensor]:
        policy = Policy(read_geometry(MODELS["llama"].to_dict()), native_length=NATIVE_LENGTH)
        engine = GrowingRealEngine(tiny(MODELS["llama"]).to(dtype), policy)
        native = engine.add("native", random_tokens(7), 11)
        engine.add("partner", random_tokens(16, seed=2), 11, wish)
        engine.run()
        assert native.choice.plan.factor == 1
        return engine, engine.logits("native")

    growing, beside_growing = beside(RopeWish(mode="dynamic"))
    static, beside_static = beside(RopeWish(factor=4.0))
    assert growing.runner.steps == static.runner.steps
    assert growing.sequences["partner"].num_rerotations == 2
    assert torch.equal(beside_growing, beside_static)


@pytest.mark.parametrize("num_pages", [18, 120])  # pages are moved in place, or copied
def test_layers_with_a_rotation_of_their_own_keep_it(num_pages: int) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    shape = {**SHAPE, "rope_parameters": rope, "head_dim": 16}
    config = Gemma3TextConfig(**shape, sliding_window=8, layer_types=kinds)
    engine = serving(config, num_pages=num_pages, max_batch_tokens=16)
    sequence = engine.add("a", random_tokens(12), 11)
    while sequence.num_computed < NATIVE_LENGTH:
        engine.engine.step()
    old, pages = sequence.plan, list(sequence.tables[0].pages)
    before = [keys_of(engine, sequence, layer) for layer in range(3)]
    engine.engine.step()
    new = sequence.plan
    assert (sequence.num_rerotations, list(sequence.tables[0].pages[:2]) == pages[:2]) == (1, num_pages == 18)
    after = [keys_of(engine, sequence, layer)[: len(keys)] for layer, keys in enumerate(before)]
    assert [len(keys) for keys in before] == [10, NATIVE_LENGTH, 10]  # the windows begin in the third page
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    turn = replace(new, inv_freq=tuple(b - a for a, b in zip(old.inv_freq, new.inv_freq, strict=True)))
    turn = replace(turn, attention_factor=new.attention_factor / old.attention_factor)
    expected = rotate(before[1], torch.arange(NATIVE_LENGTH), turn, "half")
    assert torch.allclose(after[1], expected, atol=1e-5, rtol=0)
    engine.run()
