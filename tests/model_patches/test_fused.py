"""Fused models against the same models unfused: what is recognised, what comes out, what happens to the weights."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from model_patches import fused
from model_patches.kernels import build
from model_patches.loading.load import load_model
from model_patches.patch import PatchedModel
from model_patches.rope_config import read_geometry
from service.scaling.policy import Policy, RopeWish
from tests.reference.growing import tiny
from tests.reference.harness import RealEngine
from tests.reference.supported import FAMILIES, SCALED, SHAPE
from tests.reference.text import real_text

RECOGNISED = {"llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "glm", "helium", "ernie4_5"}
CONFIGS: dict[str, Any] = {
    **FAMILIES,
    **SCALED,
    "llama, tied": LlamaConfig(**{**SHAPE, "tie_word_embeddings": True}),
    "llama, biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama, odd sizes": LlamaConfig(
        **{**SHAPE, "hidden_size": 42, "intermediate_size": 50, "vocab_size": 129}, head_dim=10
    ),
    "qwen2, windows above": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3, tied": Qwen3Config(**{**SHAPE, "tie_word_embeddings": True}, head_dim=16, attention_bias=True),
}
FUSABLE = [name for name, config in CONFIGS.items() if config.model_type in RECOGNISED]
DIFFERENT = {name: config for name, config in CONFIGS.items() if config.model_type == "granite"}
OTHERS: dict[str, Any] = {
    **{name: config for name, config in CONFIGS.items() if name not in {*FUSABLE, *DIFFERENT}},
    "llama, another activation": LlamaConfig(**SHAPE, hidden_act="gelu"),
}
LENGTHS = {"a": 3, "b": 16, "c": 40, "d": 100, "e": 57}

needs_operators = pytest.mark.usefixtures("operators")


@pytest.fixture(scope="module")
def operators() -> None:
    if not build.load():
        pytest.skip("no C++ operators")


@pytest.fixture
def never_fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, models stay unfused."""
    return lambda: monkeypatch.setattr(fused, "fuse", lambda *_: None)


def patched(config: Any, dtype: torch.dtype = torch.float32) -> PatchedModel:
    return PatchedModel(tiny(config).to(dtype), read_geometry(config.to_dict()))


def weights_of(model: PatchedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.model.named_parameters()}


@needs_operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSABLE)
def test_a_recognised_shape_runs_fused_and_its_modules_keep_no_weights(name: str, dtype: torch.dtype) -> None:
    model = patched(CONFIGS[name], dtype)
    assert model.is_fused
    held = {parameter_name for parameter_name, parameter in model.model.named_parameters() if parameter.numel()}
    untied = {"model.embed_tokens.weight"} if not model.model.config.tie_word_embeddings else set()
    assert {kept for kept in held if "norm" not in kept and not kept.endswith("bias")} == untied


@needs_operators
@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_run_unfused_and_one_line_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=fused.__name__)
    model = patched(OTHERS[name])
    assert not model.is_fused
    [record] = [record for record in caplog.records if record.name == fused.__name__]
    assert record.levelno == logging.INFO
    assert "unfused" in record.message


@needs_operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_model_that_computes_something_else_in_the_same_shape_is_found_out_and_left_as_it_was(
    name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = patched(DIFFERENT[name], dtype)
    assert not model.is_fused
    [record] = [record for record in caplog.records if record.name == fused.__name__]
    assert record.levelno == logging.WARNING
    expected = dict(tiny(DIFFERENT[name]).to(dtype).named_parameters())
    weights = weights_of(model)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[parameter], expected[parameter]) for parameter in expected)


def test_a_float16_model_and_one_without_operators_run_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not patched(FAMILIES["llama"], torch.float16).is_fused
    monkeypatch.setattr(build, "load", lambda: False)
    assert not patched(FAMILIES["llama"]).is_fused


@needs_operators
def test_a_parameter_that_no_known_module_has_keeps_a_model_unfused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=fused.__name__)
    config = FAMILIES["llama"]
    model = tiny(config)
    model.model.layers[1].self_attn.register_parameter("sinks", torch.nn.Parameter(torch.zeros(6)))
    assert not PatchedModel(model, read_geometry(config.to_dict())).is_fused
    assert "model.layers.1.self_attn.sinks" in caplog.text


@needs_operators
def test_a_model_need_not_be_fused() -> None:
    config = FAMILIES["llama"]
    assert not PatchedModel(tiny(config), read_geometry(config.to_dict()), fuse=False).is_fused


def served(config: Any, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> RealEngine:
    """Requests of several plans, prompts in chunks beside decoding rows, one that grows over its native length."""
    engine = RealEngine(
        tiny(config).to(dtype), Policy(read_geometry(config.to_dict())), max_batch_tokens=33, kv_dtype=kv_dtype
    )
    generator = torch.Generator().manual_seed(2)
    for request_id, length in LENGTHS.items():
        prompt = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
        engine.add(request_id, prompt, 20, RopeWish(factor=2.0) if request_id == "b" else None)
    engine.run()
    return engine


@needs_operators
@pytest.mark.parametrize("name", [name for name in FUSABLE if name not in SCALED])
def test_in_float32_logits_are_those_of_the_unfused_model(name: str, never_fused: Callable[[], None]) -> None:
    ours = served(CONFIGS[name], torch.float32)
    never_fused()
    theirs = served(CONFIGS[name], torch.float32)
    assert ours.runner.model.is_fused
    assert not theirs.runner.model.is_fused
    assert {sequence.choice.plan.factor for sequence in ours.sequences.values()} >= {1.0, 2.0}
    for request_id in LENGTHS:
        got, expected = ours.logits(request_id), theirs.logits(request_id)
        assert float((got - expected).norm() / expected.norm()) < 1e-5
        assert ours.sequences[request_id].output == theirs.sequences[request_id].output


@needs_operators
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_in_bfloat16_logits_are_nearer_to_float32_than_the_unfused_models(
    kv_dtype: torch.dtype | None, never_fused: Callable[[], None]
) -> None:
    config = CONFIGS["llama, tied"]
    ours = served(config, torch.bfloat16, kv_dtype)
    never_fused()
    theirs = served(config, torch.bfloat16, kv_dtype)
    for request_id in LENGTHS:
        first = [engine.logits(request_id)[0] for engine in (ours, theirs)]
        assert float((first[0] - first[1]).norm() / first[1].norm()) < 0.05


@needs_operators
def test_pages_of_a_type_that_operators_cannot_read_bring_the_modules_back(never_fused: Callable[[], None]) -> None:
    config = CONFIGS["phi3"]
    ours = served(config, torch.float32, torch.float8_e4m3fn)
    never_fused()
    theirs = served(config, torch.float32, torch.float8_e4m3fn)
    assert not ours.runner.model.is_fused
    for request_id in LENGTHS:
        assert torch.equal(ours.logits(request_id), theirs.logits(request_id))


@pytest.mark.long
@needs_operators
def test_greedy_texts_of_the_embedded_model_part_from_float32s_no_earlier_than_the_unfused_models(
    embedded_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two ways to round, about half of all texts of 64 tokens meet a near tie; the one with fewer roundings
    must stay with the float32 model's text at least as long."""

    def texts(dtype: torch.dtype) -> dict[str, list[int]]:
        loaded = load_model(embedded_model_folder, dtype=dtype, device=torch.device("cpu"))
        engine = RealEngine(loaded.model, Policy(read_geometry(loaded.config)), max_batch_tokens=512, max_running=100)
        tokens = loaded.tokenizer.backend_tokenizer.encode(real_text()[:60_000], add_special_tokens=False).ids
        for number in range(100):
            engine.add(f"{number}", list(tokens[100 * number : 100 * number + 20 + number % 60]), 64)
        engine.run()
        return {name: sequence.output for name, sequence in engine.sequences.items()}

    def alike(ours: list[int], theirs: list[int]) -> int:
        return next((n for n, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))

    ours, exact = texts(torch.bfloat16), texts(torch.float32)
    monkeypatch.setattr(fused, "fuse", lambda *_: None)
    theirs = texts(torch.bfloat16)
    of_ours, of_theirs = (sum(alike(found[name], exact[name]) for name in exact) for found in (ours, theirs))
    assert of_ours >= of_theirs
