"""Any mix of requests on a tiny real model: with the prefix cache texts and logits are those without it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MinistralConfig, MistralConfig

from model_patches.rope_config import read_geometry
from service.core import PageCopy, PageMove, Rerotation, SamplingParams
from service.engine.runner import ModelRunner
from service.scaling.policy import Policy, RopeWish
from tests.reference.growing import SHAPE, GrowingRealEngine, tiny
from tests.reference.supported import ALTERNATING

CONFIGS = {
    "llama": LlamaConfig(**{**SHAPE, "num_hidden_layers": 2}),
    "windows": MistralConfig(**SHAPE, sliding_window=6),
    "windows in some layers": MinistralConfig(**SHAPE, **{**ALTERNATING, "sliding_window": 6}, head_dim=8),
}
# Of the pages that llama has: behind windows few are held, and layers that differ have pages of their own.
SHARE_OF_PAGES = {"llama": 1.0, "windows": 0.6, "windows in some layers": 3.0}
# Rungs of 10, 12, 15, 20, 25, 30 and 40 tokens.
POLICY = Policy(read_geometry(CONFIGS["llama"].to_dict()), native_length=10)
TEMPLATES = ([*range(40, 60)], [*range(40, 48), *range(70, 82)], [*range(70, 74), *range(44, 60)])
WISHES = [None, None, None, RopeWish(growth="reprefill"), RopeWish(factor=2.0, growth="rerotate"), RopeWish(factor=4.0)]


@dataclass(frozen=True)
class Request:
    """One request: in which round it arrives, how much of which template it begins with, what comes after that, how
    much it asks for and in which round it is cancelled, if any."""

    arrives: int
    template: int
    shared: int
    own: list[int]
    max_tokens: int
    wish: RopeWish | None
    cancelled: int | None

    @property
    def prompt(self) -> list[int]:
        return [*TEMPLATES[self.template][: self.shared], *self.own]


REQUESTS = st.builds(
    Request,
    arrives=st.integers(0, 10),
    template=st.integers(0, len(TEMPLATES) - 1),
    shared=st.sampled_from([3, 8, 8, 9, 12, 16]),
    own=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    max_tokens=st.integers(1, 16),
    wish=st.sampled_from(WISHES),
    cancelled=st.none() | st.none() | st.none() | st.integers(1, 30),
)
MIX = {
    "model": st.sampled_from([*CONFIGS]),
    "max_draft": st.sampled_from([0, 0, 4]),
    "requests": st.lists(REQUESTS, min_size=2, max_size=7),
    "num_pages": st.integers(10, 16),
    "max_running": st.integers(2, 5),
    "refresh_tokens": st.sampled_from([0, 0, 3]),
}


def serve(engine: GrowingRealEngine, requests: list[Request]) -> list[list[int]]:
    """Serve a mix to its end; what each request was answered."""
    sequences = {}
    for now in range(31):
        for number, request in enumerate(requests):
            if request.arrives == now:
                choice = POLICY.choose(len(request.prompt), request.max_tokens, request.wish)
                sampling = SamplingParams(choice.max_tokens, temperature=0.0)
                sequences[number] = engine.add(str(number), request.prompt, request.max_tokens, request.wish, sampling)
            if request.cancelled == now and number in sequences:
                engine.engine.cancel(sequences[number])
        engine.engine.step()
        engine.pages.check()
    engine.run()
    return [sequences[number].output for number in range(len(requests))]


def check(
    requests: list[Request], num_pages: int, max_running: int, refresh_tokens: int, model: str, max_draft: int
) -> tuple[GrowingRealEngine, GrowingRealEngine]:
    engines = [
        GrowingRealEngine(
            tiny(CONFIGS[model]),
            POLICY,
            num_pages=round(num_pages * SHARE_OF_PAGES[model]),
            max_running=max_running,
            max_batch_tokens=max_running + 6,
            refresh_tokens=refresh_tokens,
            prefix_caching=prefix_caching,
            max_draft=max_draft,
        )
        for prefix_caching in (True, False)
    ]
    with_cache, without = (serve(engine, requests) for engine in engines)
    for number, (request, one, other) in enumerate(zip(requests, with_cache, without, strict=True)):
        both = min(len(one), len(other))
        assert one[:both] == other[:both]
        assert request.cancelled is not None or len(one) == len(other)
        if both and not max_draft:  # with guesses there are rows for those that were wrong, too
            logits = [engine.logits(str(number))[:both] for engine in engines]
            assert float((logits[0] - logits[1]).abs().max()) <= 1e-4
    return engines[0], engines[1]


@settings(deadline=None, max_examples=40)
@given(**MIX)
def test_texts_are_the_same_with_the_prefix_cache_and_without(
    requests: list[Request], num_pages: int, max_running: int, refresh_tokens: int, model: str, max_draft: int
) -> None:
    check(requests, num_pages, max_running, refresh_tokens, model, max_draft)


@pytest.mark.long
@settings(deadline=None, max_examples=250)
@given(**MIX)
def test_texts_are_the_same_with_the_prefix_cache_and_without_in_many_mixes(
    requests: list[Request], num_pages: int, max_running: int, refresh_tokens: int, model: str, max_draft: int
) -> None:
    check(requests, num_pages, max_running, refresh_tokens, model, max_draft)


@pytest.mark.parametrize("max_draft", [0, 4])
@pytest.mark.parametrize(
    ("model", "num_pages", "preempts"),
    [("llama", 13, True), ("windows", 21, False), ("windows in some layers", 13, True)],
)
def test_such_mixes_share_grow_copy_run_out_of_pages_and_evict(
    model: str, num_pages: int, preempts: bool, max_draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        Request(number, number // 2 % 2, 8, [1], 14, wish, None) for number, wish in enumerate([*WISHES, *WISHES[:3]])
    ]
    requests[3] = replace(requests[3], cancelled=12)
    requests[6] = replace(requests[6], shared=7)
    moved: list[PageMove] = []  # to other pages, on the way to another plan
    parts: list[PageCopy] = []
    original_rerotate, original_copy = ModelRunner.rerotate, ModelRunner.copy

    def rerotate(runner: ModelRunner, rerotation: Rerotation) -> None:
        moved.extend(move for move in rerotation.moves if move.source != move.target)
        original_rerotate(runner, rerotation)

    def copy(runner: ModelRunner, copies: Sequence[PageCopy]) -> None:
        parts.extend(copies)
        original_copy(runner, copies)

    monkeypatch.setattr(ModelRunner, "rerotate", rerotate)
    monkeypatch.setattr(ModelRunner, "copy", copy)
    engine, _ = check(requests, num_pages, 5, 0, model, max_draft)
    sequences = engine.sequences.values()
    assert sum((sequence.num_prefix_tokens or 0) > 0 for sequence in sequences) >= 2
    assert max(sequence.num_rerotations for sequence in sequences) >= 3
    assert moved
    assert parts
    assert (engine.scheduler.num_preemptions > 0) == preempts
    assert engine.pages.num_evictions > 0
