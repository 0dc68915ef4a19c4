"""A GGUF file becomes a folder that holds the same model."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.convert import convert_gguf
from model_patches.loading.load import load_model, load_tokenizer

TinyGguf = Callable[..., Path]
CPU = torch.device("cpu")


def test_converted_weights_are_the_models_own(
    tiny_gguf: TinyGguf, tiny_model: LlamaForCausalLM, tmp_path: Path
) -> None:
    convert_gguf(tiny_gguf(), tmp_path)
    loaded = load_model(tmp_path, dtype=torch.bfloat16, device=CPU).model.state_dict()
    expected = tiny_model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, weights in expected.items():
        assert torch.equal(loaded[name], weights), name


@pytest.mark.parametrize(
    ("architecture", "config", "model_class", "head_dim"),
    [("qwen2", Qwen2Config, Qwen2ForCausalLM, 8), ("qwen3", Qwen3Config, Qwen3ForCausalLM, 16)],
)
def test_other_families_are_converted_too(
    tiny_gguf: TinyGguf, tmp_path: Path, architecture: str, config: Any, model_class: Any, head_dim: int
) -> None:
    model = model_class(
        config(
            vocab_size=265,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            tie_word_embeddings=True,
        )
    )
    for number, parameter in enumerate(model.parameters()):
        parameter.data = torch.full_like(parameter, number).bfloat16()
    widths = {f"{architecture}.attention.key_length": head_dim, f"{architecture}.rope.dimension_count": None}
    convert_gguf(tiny_gguf(architecture=architecture, model=model, metadata=widths), tmp_path)
    loaded = load_model(tmp_path, dtype=torch.bfloat16, device=CPU)
    assert loaded.config["architectures"] == [type(loaded.model).__name__] == [model_class.__name__]
    for name, weights in model.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), weights), name


def test_heads_of_several_widths_are_refused(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"heads 8 wide but llama\.rope\.dimension_count 4"):
        convert_gguf(tiny_gguf(metadata={"llama.rope.dimension_count": 4}), tmp_path)


def test_a_file_that_does_not_say_its_shape_is_called_damaged(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(DamagedModelError, match=r"llama\.attention\.head_count"):
        convert_gguf(tiny_gguf(metadata={"llama.attention.head_count": None}), tmp_path)


def test_tied_weights_are_written_once_and_stay_tied(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    convert_gguf(tiny_gguf(), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(tmp_path, dtype=torch.float32, device=CPU).model
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_an_output_matrix_of_its_own_is_kept(tiny_gguf: TinyGguf, tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    output = np.full(tiny_model.model.embed_tokens.weight.shape, 0.5, dtype=np.float32)
    convert_gguf(tiny_gguf(tensors={"output.weight": output}), tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=CPU).model
    assert torch.all(model.get_parameter("lm_head.weight") == 0.5)


def test_the_weights_can_be_read_by_other_users(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    convert_gguf(tiny_gguf(), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_progress_is_shown_on_stderr_only(
    tiny_gguf: TinyGguf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    convert_gguf(tiny_gguf(), tmp_path)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "converting tiny.gguf: 4/4" in shown.err


def test_all_end_tokens_of_the_file_are_taken_over(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    convert_gguf(tiny_gguf(metadata={"tokenizer.ggml.eot_token_id": 0}), tmp_path)
    assert load_model(tmp_path, dtype=torch.float32, device=CPU).generation.end_token_ids == {0, 2}


def test_the_chat_template_is_taken_over(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    convert_gguf(tiny_gguf(), tmp_path)
    chat = [{"role": "user", "content": "the text"}]
    assert load_tokenizer(tmp_path).apply_chat_template(chat, tokenize=False) == "the text"


def test_an_unscaled_file_gives_an_unscaled_config(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    convert_gguf(tiny_gguf(), tmp_path)
    assert _rope_parameters(tmp_path) == {"rope_type": "default", "rope_theta": 500_000.0}


def test_yarn_of_the_file_is_taken_over(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    convert_gguf(tiny_gguf(metadata=scaling), tmp_path)
    assert _rope_parameters(tmp_path) == {
        "rope_type": "yarn",
        "rope_theta": 500_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def test_llama3_scaling_is_recognised_by_its_divisors(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    convert_gguf(tiny_gguf(tensors={"rope_freqs.weight": _llama3_divisors(factor=8.0)}), tmp_path)
    assert _rope_parameters(tmp_path) == {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_divisors_are_refused(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    divisors = _llama3_divisors(factor=8.0) + np.float32(0.5)
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        convert_gguf(tiny_gguf(tensors={"rope_freqs.weight": divisors}), tmp_path)


def test_an_unknown_kind_of_scaling_is_refused_by_name(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'longrope'"):
        convert_gguf(tiny_gguf(metadata={"llama.rope.scaling.type": "longrope"}), tmp_path)


def test_an_unknown_architecture_is_refused_with_the_list(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, qwen2, qwen3"):
        convert_gguf(tiny_gguf(architecture="mamba"), tmp_path)


def test_experts_under_a_dense_name_are_refused(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="8 experts"):
        convert_gguf(tiny_gguf(metadata={"llama.expert_count": 8}), tmp_path)


@pytest.mark.parametrize("name", ["big-00001-of-00003.gguf", "big-00002-of-00003.GGUF"])
def test_a_part_of_several_files_is_refused(tiny_gguf: TinyGguf, tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        convert_gguf(tiny_gguf(name), tmp_path)


def test_a_renamed_part_is_refused_too(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="several files"):
        convert_gguf(tiny_gguf(metadata={"split.count": 3}), tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.2, 0.9])
def test_a_file_cut_short_is_called_damaged(tiny_gguf: TinyGguf, tmp_path: Path, kept: float) -> None:
    path = tiny_gguf()
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(DamagedModelError, match=path.name):
        convert_gguf(path, tmp_path)


def test_a_missing_weight_is_named(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(DamagedModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(tiny_gguf(without="blk.1.ffn_up.weight"), tmp_path)


def _rope_parameters(folder: Path) -> dict[str, object]:
    parameters: dict[str, object] = json.loads((folder / "config.json").read_text())["rope_parameters"]
    return parameters


def _llama3_divisors(factor: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """As llama.cpp's converter computes them, branch by branch."""
    divisors = []
    for index in range(0, 8, 2):
        wavelength = 2 * math.pi * 500_000.0 ** (index / 8)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)
