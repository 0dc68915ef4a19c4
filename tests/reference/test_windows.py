"""Models whose layers see windows, far beyond these, under the engine that gives their pages back, in float32."""

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, MinistralConfig, MistralConfig

from model_patches.kernels import build
from model_patches.patch import PatchedModel
from model_patches.rope_config import read_geometry
from service.scaling.policy import Policy, RopeWish
from tests.reference.growing import GrowingRealEngine, assert_like_unrotated, random_tokens, tiny
from tests.reference.harness import assert_like_reference
from tests.reference.supported import ALTERNATING, FAMILIES, SCALED, SHAPE, TWO_BASES
from tests.reference.unrotated import UnrotatedCache

WINDOW = 20
MODELS: dict[str, Any] = {
    "mistral": FAMILIES["mistral, window of 20"],
    "gemma2": FAMILIES["gemma2, soft caps, windows in some layers"],
    "gemma3": FAMILIES["gemma3, windows with a base of their own"],
    "ministral": FAMILIES["ministral, windows in some layers"],
    "gpt-oss": SCALED["gpt-oss, yarn without truncation"],
}
WINDOWS = {
    "mistral": (WINDOW,) * 3,
    "gpt-oss": (WINDOW, None, WINDOW),
    **dict.fromkeys(("gemma2", "gemma3", "ministral"), (WINDOW, None, WINDOW)),
}
GROWING: dict[str, Any] = {
    "mistral": MistralConfig(**SHAPE, sliding_window=7),
    "ministral": MinistralConfig(**SHAPE, **{**ALTERNATING, "sliding_window": 7}, head_dim=8),
    "gemma2": Gemma2Config(**SHAPE, **{**ALTERNATING, "sliding_window": 7}, head_dim=8, query_pre_attn_scalar=12),
    "gemma3": Gemma3TextConfig(
        **{**SHAPE, "rope_parameters": TWO_BASES}, **{**ALTERNATING, "sliding_window": 7}, head_dim=16
    ),
}


@pytest.fixture(autouse=True, scope="module", params=[True, False], ids=["operators", "torch"])
def operators(request: pytest.FixtureRequest) -> bool:
    """Attention and layers by the C++ operators, or by torch."""
    return bool(request.param) and build.load()


@pytest.fixture(autouse=True)
def by_torch(operators: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not operators:
        monkeypatch.setattr("model_patches.attention.ops.are_loaded", lambda: False)
        monkeypatch.setattr("model_patches.rerotation.ops.are_loaded", lambda: False)


def serving(config: Any, operators: bool, native_length: int | None = None, **settings: Any) -> GrowingRealEngine:
    policy = Policy(read_geometry(config.to_dict(), "config"), native_length=native_length)
    return GrowingRealEngine(tiny(config), policy, fuse=operators, **settings)


@pytest.mark.parametrize("model", MODELS)
def test_the_windows_are_those_that_layers_ask_for(model: str) -> None:
    config = MODELS[model]
    patched = PatchedModel(tiny(config), read_geometry(config.to_dict(), "config"), fuse=False)
    assert patched.windows == WINDOWS[model]
    assert PatchedModel(tiny(FAMILIES["llama"]), read_geometry(SHAPE), fuse=False).windows == (None,) * 3


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_transformers_far_beyond_the_window(model: str, operators: bool) -> None:
    config = MODELS[model]
    engine = serving(config, operators, max_batch_tokens=24)
    assert engine.runner.model.is_fused == (operators and model in ("mistral", "ministral"))
    long = engine.add("long", random_tokens(101), 90)
    engine.add("short", random_tokens(9, seed=2), 40)
    most = [0]
    while long.num_tokens < 190:
        engine.engine.step()
        held = [len(table.pages) for table in long.tables]
        windowed = held if model == "mistral" else held[1:]
        most.append(max(windowed, default=0))
    assert max(most) <= (WINDOW + 24) / 4 + 2
    assert most[-1] <= WINDOW / 4 + 2
    engine.run()
    for name in ("long", "short"):
        assert_like_reference(engine, tiny(config), name)


@pytest.mark.parametrize("model", MODELS)
def test_prefixes_and_what_was_preempted_give_the_same(model: str, operators: bool) -> None:
    config = MODELS[model]
    engine = serving(config, operators, num_pages=120, max_batch_tokens=24)
    prompt = random_tokens(70)
    wish = None if model == "gpt-oss" else RopeWish(factor=4.0)
    engine.add("first", prompt, 20, wish)
    engine.run()
    again = engine.add("again", [*prompt, 1, 2], 30, wish)
    early = engine.add("early", [*prompt[:40], 5], 30, wish)
    while len(again.output) < 12:
        engine.engine.step()
    assert (again.num_prefix_tokens, early.num_prefix_tokens) == (70, 40)
    engine.scheduler._preempt_youngest({})
    engine.run()
    for name in ("first", "again", "early"):
        assert_like_reference(engine, tiny(config), name)


@pytest.mark.parametrize("num_pages", [44, 400])  # pages are moved in place, or copied
@pytest.mark.parametrize("refresh_tokens", [0, 5])
@pytest.mark.parametrize("model", GROWING)
def test_windows_move_with_a_sequence_that_grows(
    model: str, refresh_tokens: int, num_pages: int, operators: bool
) -> None:
    config = GROWING[model]
    engine = serving(config, operators, 18, refresh_tokens=refresh_tokens, num_pages=num_pages, max_batch_tokens=16)
    paths = {"all": (12, 60), "prompt": (18, 20), "some": (12, 14)}
    sequences = [
        engine.add(name, random_tokens(length, seed), count)
        for seed, (name, (length, count)) in enumerate(paths.items())
    ]
    while sequences[0].num_tokens < 40:
        engine.engine.step()
    engine.scheduler._preempt_youngest({})
    engine.run()
    reference = tiny(config)
    for sequence in sequences:
        assert_like_unrotated(engine, reference, sequence)


@pytest.mark.parametrize("model", ["mistral", "gemma2"])
def test_prefixes_of_other_plans_are_moved(model: str, operators: bool) -> None:
    engine = serving(GROWING[model], operators, 18)
    prompt = random_tokens(14)
    engine.add("unscaled", prompt, 2)
    engine.run()
    wish = RopeWish(factor=4.0, prefix_reuse="rerotate")
    moved = engine.add("moved", prompt, 8, wish)
    engine.run()
    assert moved.num_other_plan_prefix_tokens == 12
    cache = UnrotatedCache(tiny(GROWING[model]), engine.runner.model.geometry.layout)
    tokens = [*prompt, *moved.output[:-1]]
    cache.forward(tokens[:12], moved.history[0].plan)
    expected = cache.forward(tokens[12:], moved.last_plan)[1:]
    assert torch.allclose(engine.logits("moved"), expected, atol=1e-4, rtol=0)
