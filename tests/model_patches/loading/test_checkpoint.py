"""Models that cannot be served are refused by name, before anything of them is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from model_patches.errors import DamagedModelError, ModelNotFoundError, UnsupportedModelError
from model_patches.loading.checkpoint import SUPPORTED_ARCHITECTURES, check_config, check_weights, read_config

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_supported_architectures_pass(architecture: str) -> None:
    check_config({"architectures": [architecture]})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification'"),
        ({"architectures": []}, "names no architecture"),
        ({"model_type": "llama"}, "names no architecture"),
    ],
)
def test_other_architectures_are_refused_with_the_list(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{named}.*supported: LlamaForCausalLM, MistralForCausalLM"):
        check_config(config)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4"])
def test_quantised_weights_are_refused_by_method(method: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"\({method}\)"):
        check_config({**LLAMA, "quantization_config": {"quant_method": method}})


def test_older_spellings_of_quantisation_are_refused_too() -> None:
    with pytest.raises(UnsupportedModelError, match=r"\(bitsandbytes\)"):
        check_config({**LLAMA, "quantization_config": {"load_in_4bit": True}})
    with pytest.raises(UnsupportedModelError, match=r"\(compressed-tensors\)"):
        check_config({**LLAMA, "compression_config": {"quant_method": "compressed-tensors"}})
    with pytest.raises(UnsupportedModelError, match=r"\(an unnamed method\)"):
        check_config({**LLAMA, "quantization_config": {"bits": 4}})


def test_an_empty_quantisation_entry_is_none() -> None:
    check_config({**LLAMA, "quantization_config": None})


def test_remote_code_is_refused_unless_trusted() -> None:
    config = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    with pytest.raises(UnsupportedModelError, match="--trust-remote-code"):
        check_config(config)
    check_config(config, trust_remote_code=True)


def test_pickled_weights_are_refused_by_file_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        check_weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    check_weights(tmp_path)


def test_a_folder_without_weights_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no weights"):
        check_weights(tmp_path)


def test_the_config_alone_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == LLAMA


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        read_config(tmp_path)
    for broken in ("{", "[]"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(DamagedModelError, match=r"config\.json"):
            read_config(tmp_path)
