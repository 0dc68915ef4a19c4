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
from transformers import LlamaForCausalLM

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


def test_a_template_of_its_own_for_tools_is_taken_over(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    templates = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools[0].name }}"}
    convert_gguf(tiny_gguf(metadata=templates), tmp_path)
    tokenizer, chat = load_tokenizer(tmp_path), [{"role": "user", "content": "the text"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "the text"
    assert tokenizer.apply_chat_template(chat, tools=[{"name": "look"}], tokenize=False) == "look"


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


def test_options_of_yarn_are_taken_over(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    scaling: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    scaling |= {"yarn_beta_fast": 20.0, "yarn_beta_slow": 2.0, "yarn_attn_factor": 1.3}
    convert_gguf(tiny_gguf(metadata={f"llama.rope.scaling.{key}": value for key, value in scaling.items()}), tmp_path)
    expected = {"beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.3}
    assert expected.items() <= _rope_parameters(tmp_path).items()


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_kind_is_linear(tiny_gguf: TinyGguf, tmp_path: Path, key: str) -> None:
    convert_gguf(tiny_gguf(metadata={f"llama.{key}": 4.0}), tmp_path)
    assert _rope_parameters(tmp_path) == {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("key", "value"), [("yarn_ext_factor", 0.5), ("yarn_log_multiplier", 0.1), ("alpha", 1000.0), ("attn_factor", 1.2)]
)
def test_what_changes_angles_and_is_not_read_is_refused(
    tiny_gguf: TinyGguf, tmp_path: Path, key: str, value: float
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"llama\.rope\.scaling\.{key} {value:g}"):
        convert_gguf(tiny_gguf(metadata={f"llama.rope.scaling.{key}": value}), tmp_path)


def test_a_file_that_names_no_base_has_llama_cpps(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    convert_gguf(tiny_gguf(metadata={"llama.rope.freq_base": None}), tmp_path)
    assert _rope_parameters(tmp_path)["rope_theta"] == 10_000.0


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


def test_a_type_that_cannot_be_unpacked_is_refused_by_its_name(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    path = tiny_gguf(tensors={"blk.0.attn_q.weight": np.zeros((32, 32), dtype=np.float64)})
    with pytest.raises(
        UnsupportedModelError, match=r"blk\.0\.attn_q\.weight as F64.*what can is BF16, F16, F32,.*Q4_K"
    ):
        convert_gguf(path, tmp_path)


def test_a_type_without_a_name_is_refused_and_not_called_damage(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    path = tiny_gguf()
    content = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions, and two of them
    content[place : place + 4] = (9999).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(
        UnsupportedModelError, match=r"tiny\.gguf stores tensors in a way that is not known here: .*9999"
    ):
        convert_gguf(path, tmp_path)


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
