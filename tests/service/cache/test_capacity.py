"""The computed capacities of docs/capacity.md, against transformers' models and the server's own report."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from benchmarks.capacity import BYTES, GPUS, MODELS, Model, read_model
from tests.service.evaluation.tiny import save_tiny
from tests.serving import real_server


def config_of(model: Model) -> PreTrainedConfig:
    kind = Qwen2Config if model.biased else LlamaConfig
    return kind(
        num_hidden_layers=model.layers,
        hidden_size=model.hidden,
        intermediate_size=model.inner,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        vocab_size=model.vocabulary,
        tie_word_embeddings=model.tied,
    )


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_weights_are_those_of_transformers(model: Model) -> None:
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config_of(model))
    assert sum(parameter.numel() for parameter in built.parameters()) * BYTES == model.weights


def test_a_config_is_read_as_the_server_reads_it(tmp_path: Path) -> None:
    model = read_model(save_tiny(tmp_path / "tiny") / "config.json")
    with real_server(model=str(tmp_path / "tiny"), device="cpu", dtype="bf16", kv_cache_memory=2**20) as server:
        samples = server.samples()
    reported = samples["ropewalk_kv_cache_bytes"] / samples["ropewalk_kv_cache_tokens"]
    assert model.token_bytes(1) == reported
    assert model.token_bytes(2) == reported / 2


def test_the_published_sizes_come_out() -> None:
    small, llama, _qwen, large = MODELS
    assert small.weights == 2 * 134_515_008
    assert llama.weights == 2 * 8_030_261_248
    assert large.weights == 2 * 70_553_706_496


def test_a_decode_step_reads_weights_and_cache_and_a_prefill_computes() -> None:
    llama, gpu = MODELS[1], GPUS[1]
    alone = llama.decode_rate(gpu, 1, context=0, requests=1)
    assert alone == pytest.approx(gpu.bandwidth / (2 * llama.computing))
    step = 64 / llama.decode_rate(gpu, 1, context=8192, requests=64)
    assert step == pytest.approx((2 * llama.computing + 64 * 8192 * 131_072) / gpu.bandwidth)
    assert llama.prefill_seconds(gpu, 2, 8192) == pytest.approx(llama.prefill_seconds(gpu, 1, 8192) / 2)
