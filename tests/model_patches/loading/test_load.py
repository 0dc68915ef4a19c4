"""A folder becomes a model that is ready to run, or a clear refusal."""

import json
import logging as levels
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationMixin, LlamaForCausalLM
from transformers.utils import logging

from model_patches.errors import DamagedModelError, ModelNotFoundError, UnsupportedModelError
from model_patches.loading.load import load_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_ready_to_run(tiny_folder: Path, tiny_model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    loaded = load_model(tiny_folder, dtype=dtype, device=CPU)
    assert not loaded.model.training
    for name, weights in loaded.model.named_parameters():
        assert (weights.dtype, weights.device, weights.requires_grad) == (dtype, CPU, False), name
        assert torch.equal(weights.float(), tiny_model.get_parameter(name).float()), name
    assert loaded.model.get_parameter("lm_head.weight") is loaded.model.get_parameter("model.embed_tokens.weight")
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the  the")) == "the  the"
    assert loaded.generation.end_token_ids == {2}


def test_the_config_is_the_files_own(tiny_folder: Path) -> None:
    path = tiny_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kept": "as it is"}))
    assert load_model(tiny_folder, dtype=torch.float32, device=CPU).config == json.loads(path.read_text())


def test_loading_is_silent_and_leaves_global_switches_as_they_were(
    tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.set_verbosity(levels.WARNING)
    assert logging.is_progress_bar_enabled()
    load_model(tiny_folder, dtype=torch.bfloat16, device=CPU)
    assert capfd.readouterr() == ("", "")
    assert torch.get_default_dtype() == torch.float32
    assert logging.get_verbosity() == levels.WARNING
    assert logging.is_progress_bar_enabled()


def test_missing_weights_are_named_instead_of_made_up(tiny_folder: Path) -> None:
    weights = load_file(tiny_folder / "model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    save_file(weights, tiny_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedModelError, match=r"lack model\.layers\.1\.self_attn\.o_proj\.weight"):
        load_model(tiny_folder, dtype=torch.float32, device=CPU)


def test_weights_of_another_shape_are_refused(tiny_folder: Path) -> None:
    weights = load_file(tiny_folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7, dtype=torch.bfloat16)
    save_file(weights, tiny_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedModelError, match="do not fit its config"):
        load_model(tiny_folder, dtype=torch.float32, device=CPU)


def test_weights_cut_short_are_called_damaged(tiny_folder: Path) -> None:
    path = tiny_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedModelError, match="cannot be read"):
        load_model(tiny_folder, dtype=torch.float32, device=CPU)


def test_a_folder_without_a_tokenizer_is_called_damaged(tiny_folder: Path) -> None:
    (tiny_folder / "tokenizer.json").unlink()
    with pytest.raises(DamagedModelError, match="tokenizer"):
        load_model(tiny_folder, dtype=torch.float32, device=CPU)


def test_refusals_come_before_weights_are_looked_for(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="no weights"):
        load_model(tiny_folder, dtype=torch.float32, device=CPU)
    config = json.loads((tiny_folder / "config.json").read_text())
    (tiny_folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UnsupportedModelError, match="awq"):
        load_model(tiny_folder, dtype=torch.float32, device=CPU)


def test_the_embedded_model_answers(embedded_model_folder: Path) -> None:
    loaded = load_model(embedded_model_folder, dtype=torch.float32, device=CPU)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    generate: Callable[..., torch.Tensor] = GenerationMixin.generate
    output = generate(loaded.model, torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    answer = output[0, len(ids) :].tolist()
    assert loaded.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert answer[-1] in loaded.generation.end_token_ids
