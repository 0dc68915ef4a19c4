"""A prefix that ends within a page: the logits after it are those without a cache, on tiny models."""

from typing import Any

import pytest
import torch

from model_patches.kernels import build
from model_patches.rope_config import read_geometry
from service.scaling.policy import Policy, RopeWish
from tests.reference.growing import GrowingRealEngine, random_tokens, tiny
from tests.reference.harness import assert_like_reference
from tests.reference.supported import FAMILIES

MODELS: dict[str, Any] = {
    "llama": FAMILIES["llama"],
    "mistral": FAMILIES["mistral, window of 20"],
    "gemma3": FAMILIES["gemma3, windows with a base of their own"],
}
PAGE_SIZE = 16
PROMPT = random_tokens(50)


@pytest.fixture(params=[True, False], ids=["operators", "torch"])
def fuse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Layers, attention and pages by the C++ operators, or by torch."""
    if not request.param or not build.load():
        monkeypatch.setattr("model_patches.attention.ops.are_loaded", lambda: False)
        monkeypatch.setattr("model_patches.rerotation.ops.are_loaded", lambda: False)
        return False
    return True


def serving(model: str, **settings: Any) -> GrowingRealEngine:
    config = MODELS[model]
    policy = Policy(read_geometry(config.to_dict(), "config"))
    return GrowingRealEngine(tiny(config), policy, page_size=PAGE_SIZE, **settings)


def first(engine: GrowingRealEngine, name: str, prompt: list[int], wish: RopeWish | None = None) -> int | None:
    """Serve a request alone; how much of its prompt was found."""
    sequence = engine.add(name, prompt, 6, wish)
    engine.run()
    return sequence.num_prefix_tokens


@pytest.mark.parametrize("wish", [None, RopeWish(factor=2.0)], ids=["unscaled", "static"])
@pytest.mark.parametrize("same", [2, 23, 47])
@pytest.mark.parametrize("model", MODELS)
def test_logits_after_a_part_of_a_page_are_those_of_the_reference(
    model: str, same: int, wish: RopeWish | None, fuse: bool
) -> None:
    engine = serving(model, fuse=fuse)
    assert first(engine, "first", PROMPT, wish) == 0
    tail = [(token + 1) % 128 for token in PROMPT[same:]]
    assert first(engine, "second", [*PROMPT[:same], *tail], wish) == same
    reference = tiny(MODELS[model])
    for name in ("first", "second"):
        assert_like_reference(engine, reference, name, tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_they_are_bit_for_bit_those_without_a_cache_where_chunks_end_alike(
    model: str, dtype: torch.dtype, fuse: bool
) -> None:
    """Ten tokens a step: the prefix of 40 ends where a chunk does, in the middle of a page."""
    cached, alone = (
        serving(model, fuse=fuse, kv_dtype=dtype, max_batch_tokens=10, prefix_caching=caching)
        for caching in (True, False)
    )
    assert first(cached, "first", PROMPT) == 0
    other = [*PROMPT[:40], *random_tokens(15, seed=2)]
    assert first(cached, "other", other) == 40
    first(alone, "other", other)
    assert [step for step in cached.runner.steps if "other" in step] == alone.runner.steps[4:]
    assert torch.equal(cached.logits("other"), alone.logits("other"))
