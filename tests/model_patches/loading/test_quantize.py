"""Quantised weights are near what they were, smaller, and refused where nothing can multiply them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaForCausalLM, MixtralConfig

from model_patches.errors import UnsupportedModelError
from model_patches.loading import quantize as quantization
from model_patches.loading.load import load_model
from model_patches.loading.quantize import check_quantization, quantize, weight_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOKENS = torch.arange(5, 45)[None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchao were there; nothing of it is called."""
    monkeypatch.setattr(quantization, "find_spec", lambda _: "found")


@pytest.mark.usefixtures("installed")
def test_int4_on_a_cpu_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r"int4 does not run on a CPU: .*no kernel there; use int8"):
        check_quantization("int4", CPU, torch.bfloat16)
    check_quantization("int8", CPU, torch.bfloat16)


@pytest.mark.usefixtures("installed")
def test_int4_wants_the_dtype_of_its_kernel() -> None:
    with pytest.raises(UnsupportedModelError, match=r"needs dtype bfloat16.*it is torch\.float16"):
        check_quantization("int4", CUDA, torch.float16)
    check_quantization("int4", CUDA, torch.bfloat16)


def test_without_torchao_the_extra_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'ropewalk\[quant\]'"):
        load_model(tiny_folder, dtype=torch.float32, device=CPU, quantization="int8")


def test_a_model_without_linear_layers_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has products of another kind"):
        quantize(model, "int8")


def test_the_size_is_that_of_what_is_stored_and_shared_weights_count_once(tiny_model: LlamaForCausalLM) -> None:
    embedding, attention, mlp, norms = 265 * 32, 2 * (32 * 32 + 16 * 32), 3 * 32 * 48, 5 * 32
    buffers = sum(buffer.nbytes for buffer in tiny_model.buffers())
    assert weight_bytes(tiny_model) == 2 * (embedding + 2 * (attention + mlp) + norms) + buffers


@pytest.mark.long
class TestWithTorchao:
    @pytest.fixture(autouse=True)
    def _torchao(self) -> None:
        pytest.importorskip("torchao")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_int8_is_rounded_row_by_row_and_the_rest_is_kept(self, tiny_folder: Path, dtype: torch.dtype) -> None:
        plain = load_model(tiny_folder, dtype=dtype, device=CPU).model
        quantised = load_model(tiny_folder, dtype=dtype, device=CPU, quantization="int8").model
        for name, module in plain.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                weights, rows = module.weight.float(), module.weight.float().abs().amax(1, keepdim=True)
                found: Any = quantised.get_submodule(name).weight
                error = (found.dequantize().float() - weights).abs()
                assert (error <= rows / 127 * 0.51 + rows * torch.finfo(dtype).eps).all(), name
                assert error.max() > 0, name
        for name in ("model.embed_tokens", "model.norm", "lm_head"):
            assert torch.equal(quantised.get_parameter(f"{name}.weight"), plain.get_parameter(f"{name}.weight"))

    def test_a_quantised_layer_multiplies_what_it_stores(self, tiny_folder: Path) -> None:
        model = load_model(tiny_folder, dtype=torch.float32, device=CPU, quantization="int8").model
        layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
        hidden = torch.randn(3, 48)
        expected = hidden.double() @ layer.weight.dequantize().double().T
        torch.testing.assert_close(layer(hidden).double(), expected, rtol=0, atol=1e-5)

    def test_each_weight_takes_a_byte_and_each_row_a_scale_and_a_zero_point(self, tiny_folder: Path) -> None:
        plain = load_model(tiny_folder, dtype=torch.float32, device=CPU).model
        quantised = load_model(tiny_folder, dtype=torch.float32, device=CPU, quantization="int8").model
        linear = [m for name, m in plain.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
        saved = sum(3 * layer.weight.numel() - (4 + 1) * layer.out_features for layer in linear)
        assert weight_bytes(plain) - weight_bytes(quantised) == saved

    def test_experts_are_refused(self) -> None:
        sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
        model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads, num_local_experts=2))
        with pytest.raises(UnsupportedModelError, match=r"int8 takes linear layers only.*experts"):
            quantize(model, "int8")

    def test_rows_that_int4_does_not_divide_are_refused_by_layer(self, tiny_model: LlamaForCausalLM) -> None:
        with pytest.raises(UnsupportedModelError, match=r"multiple of 64 weights; .*q_proj has 32"):
            quantize(tiny_model, "int4")

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    @pytest.mark.parametrize("kind", ["int8", "int4"])
    def test_on_cuda_logits_stay_near(self, embedded_model_folder: Path, kind: Any) -> None:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA}
        plain, quantised = (
            load_model(embedded_model_folder, **options, quantization=chosen).model(TOKENS.cuda()).logits.float()
            for chosen in (None, kind)
        )
        assert torch.cosine_similarity(plain, quantised, dim=-1).min() > 0.9
