"""Recorded decode steps, with a stand-in for CUDA graphs: what engines compute by replay is what the reference says."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from model_patches import attention
from model_patches.kernels import build, ops
from model_patches.pages import PagedTensor
from model_patches.plan import make_plan
from model_patches.recorded import DecodeShape, Recorder, Recording
from model_patches.rope_config import read_geometry
from model_patches.rotary import FIRST_ROWS
from service.scaling.policy import Policy, RopeWish
from tests.model_patches.varlen import emulated_varlen_attn
from tests.recording import TapeRecorder
from tests.reference.growing import GrowingRealEngine, assert_like_unrotated, random_tokens, tiny
from tests.reference.harness import assert_like_reference
from tests.reference.supported import FAMILIES, SCALED

NATIVE_LENGTH = 18  # rungs of 18, 22, 27, 36, 45, 54 and 72 tokens
MODELS = {
    name: FAMILIES[name]
    for name in (
        *("llama", "phi3, half of each head", "glm4", "cohere", "ministral, windows in some layers"),
        *("mistral, window of 20", "qwen3", "gemma3, windows with a base of their own"),
    )
}
RECORDED = {
    name: config
    for name, config in {**FAMILIES, **SCALED}.items()
    if not name.startswith(("gemma2", "deepseek"))  # FlashAttention has no soft cap, nor keys wider than values
}


@pytest.fixture(params=["varlen", "operators"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What attends: FlashAttention, by its emulation, or the C++ operators."""
    if request.param == "varlen":
        monkeypatch.setattr(varlen, "varlen_attn", emulated_varlen_attn)
        monkeypatch.setattr(attention, "uses_varlen", lambda *_: True)
        monkeypatch.setattr(attention, "_VARLEN_PAGE", 4)
        # As on CUDA, where pages begin as zeros.
        monkeypatch.setattr("service.cache.pool.PagedTensor.allocate", _zeros(PagedTensor.allocate))
    elif not build.load():
        pytest.skip("there are no C++ operators")
    return str(request.param)


def _zeros(allocate: Callable[..., Any]) -> Callable[..., Any]:
    def allocated(*arguments: Any) -> Any:
        made = allocate(*arguments)
        made.zero_()
        return made

    return allocated


def serving(
    config: Any, record: Recorder, native_length: int | None = NATIVE_LENGTH, **settings: Any
) -> GrowingRealEngine:
    policy = Policy(read_geometry(config.to_dict(), "config"), native_length=native_length)
    return GrowingRealEngine(tiny(config), policy, fuse=False, record=record, **settings)


@pytest.mark.parametrize("model", MODELS)
def test_requests_of_many_plans_that_come_grow_and_go_are_those_of_the_reference(model: str, kernel: str) -> None:
    del kernel
    recorder = TapeRecorder()
    engine = serving(MODELS[model], recorder, max_running=7)
    recorded = recorder.recordings
    assert recorded == len([1, 2, 4, 8])
    replayed = recorder.replays
    wishes = [None, RopeWish(factor=2.0, growth="rerotate"), RopeWish(scheme="ntk"), RopeWish(factor=1.5), None]
    sequences = [
        engine.add(str(seed), random_tokens(5 + 3 * seed, seed), 6 + 7 * seed, wish) for seed, wish in enumerate(wishes)
    ]
    for _ in range(9):
        engine.engine.step()
    sequences.append(engine.add("late", random_tokens(30, 9), 12))
    engine.run()
    decode_steps = [step for step in engine.runner.steps if set(step.values()) == {1}]
    assert recorder.replays - replayed == len(decode_steps) > 20
    assert {len(step) for step in decode_steps} >= {1, 2, 3, 4, 5}
    assert recorder.recordings == recorded
    assert sum(sequence.num_rerotations for sequence in sequences) > 3
    reference = tiny(MODELS[model])
    for sequence in sequences:
        assert_like_unrotated(engine, reference, sequence)


@pytest.mark.parametrize("kernel", ["varlen"], indirect=True)
def test_sinks_are_recorded(kernel: str) -> None:
    del kernel
    config, recorder = SCALED["gpt-oss, yarn without truncation"], TapeRecorder()
    engine = serving(config, recorder, native_length=None, max_running=2)
    replayed = recorder.replays
    for length in (9, 40):
        engine.add(str(length), random_tokens(length), 20)
    engine.run()
    assert recorder.replays > replayed + 15
    reference = tiny(config)
    for length in (9, 40):
        assert_like_reference(engine, reference, str(length))


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 8]), (17, [1, 2, 4, 8, 16, 24])])
def test_there_is_a_recording_with_room_for_every_step(most: int, sizes: list[int]) -> None:
    assert DecodeShape([], [None], [], longest=1, most_rows=most).sizes == sizes


def test_a_step_that_wants_no_logits_is_not_replayed(kernel: str) -> None:
    del kernel
    recorder = TapeRecorder()
    engine = serving(MODELS["llama"], recorder, max_running=1, max_batch_tokens=1)
    replayed = recorder.replays
    engine.add("a", random_tokens(9), 4)
    engine.run()
    assert (len(engine.runner.steps), recorder.replays - replayed) == (12, 4)
    assert_like_reference(engine, tiny(MODELS["llama"]), "a")


def test_plans_for_which_the_table_moves_are_not_replayed_in_its_old_place(kernel: str) -> None:
    del kernel
    recorder = TapeRecorder()
    engine = serving(MODELS["llama"], recorder, max_running=2)
    geometry = engine.runner.model.geometry
    for number in range(FIRST_ROWS):
        engine.runner.model.plan_row(make_plan(geometry, "linear", 1 + number / 100, 1000))
    replayed = recorder.replays
    sequences = [engine.add(name, random_tokens(20, 2), 9, RopeWish(scheme=name)) for name in ("yarn", "ntk")]
    engine.run()
    assert recorder.replays == replayed
    reference = tiny(MODELS["llama"])
    for sequence in sequences:
        assert_like_unrotated(engine, reference, sequence)


@pytest.mark.parametrize("kernel", ["varlen"], indirect=True)
@pytest.mark.parametrize("model", RECORDED)
def test_decode_steps_of_every_family_that_flash_attention_takes_are_recorded(
    model: str, kernel: str, caplog: pytest.LogCaptureFixture
) -> None:
    del kernel
    caplog.set_level("INFO")
    serving(RECORDED[model], TapeRecorder(), native_length=None, max_running=3)
    assert any(line.startswith("decode steps of up to 4 rows recorded in ") for line in caplog.messages)


def frozen(what: str) -> Recorder:
    """A recorder whose replays take one of the arguments for a constant: for what it was when they were recorded."""

    def record(compute: Any) -> Recording:
        held = getattr(compute.func.__self__, f"_{what}")
        memory = held if isinstance(held, list) else [held]
        then = [tensor.clone() for tensor in memory]

        @torch.inference_mode()
        def replay() -> None:
            now = [tensor.clone() for tensor in memory]
            for tensor, old in zip(memory, then, strict=True):
                tensor.copy_(old)
            compute()
            for tensor, new in zip(memory, now, strict=True):
                tensor.copy_(new)

        return Recording(replay, compute())

    return record


def refusing(_compute: Callable[[], torch.Tensor]) -> Recording:
    raise RuntimeError("not when a stream is capturing")


REFUSED: dict[str, tuple[str, Recorder, str]] = {
    "a device that refuses": ("llama", refusing, "not when a stream is capturing"),
    "soft caps": (
        *("gemma2, soft caps, windows in some layers", TapeRecorder()),
        "Gemma2Attention attends one sequence at a time, which cannot be recorded",
    ),
    **{
        f"replays that forget {what}": ("llama", frozen(what), "what a replay of 8 rows computes is off by .*")
        for what in ("token_ids", "positions", "plan_rows", "seqused_k", "slots", "tables")
    },
}


@pytest.mark.parametrize("kernel", ["varlen"], indirect=True)
@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_recorded_runs_as_before_and_the_log_says_why(
    reason: str, kernel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del kernel
    monkeypatch.setattr(ops, "are_loaded", lambda: False)  # which take soft caps, on a CPU
    model, record, message = REFUSED[reason]
    engine = serving(FAMILIES[model], record, max_running=8)
    [line] = [line for line in caplog.messages if line.startswith("decode steps")]
    assert re.fullmatch(f"decode steps are not recorded, which makes them slower: {message}", line)
    engine.add("a", random_tokens(5), 12)
    engine.run()
    assert_like_reference(engine, tiny(FAMILIES[model]), "a")
