"""A merged adapter answers as PEFT does with the adapter beside the model; what cannot be merged is refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from model_patches.errors import DamagedModelError, ModelNotFoundError, UnsupportedModelError
from model_patches.loading import lora
from model_patches.loading.load import LoadedModel, load_model
from model_patches.loading.lora import CONFIG, NOT_MERGEABLE, PICKLED_WEIGHTS, WEIGHTS

pytestmark = [  # what PEFT says when a test makes an adapter
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers"),
]
CPU = torch.device("cpu")
TOKENS = torch.arange(5, 45)[None]


def load(folder: Path, adapter: Path | None = None, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(folder, dtype=dtype, device=CPU, adapter=adapter)


def saved_adapter(model_folder: Path, folder: Path, **options: Any) -> torch.Tensor:
    """Save a random adapter, and return the logits of the model with it beside the weights, float32 [1, T, V]."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options})
    with torch.random.fork_rng():
        torch.manual_seed(11)
        adapted: Any = peft.PeftModel(load(model_folder).model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.3)
    adapted.save_pretrained(folder)
    adapted.eval()
    with torch.inference_mode():
        logits: torch.Tensor = adapted(TOKENS).logits
    return logits


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(TOKENS).logits
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": "all-linear", "use_rslora": True},
        {"use_dora": True},
        {"target_modules": ["k_proj", "down_proj"], "rank_pattern": {"down_proj": 7}, "alpha_pattern": {"k_proj": 3}},
        {"target_modules": ["o_proj", "lm_head"]},
        {"target_modules": ["o_proj", "embed_tokens"]},
        {"modules_to_save": ["norm"]},
    ],
    ids=["plain", "rslora", "dora", "patterns", "head", "embedding", "saved modules"],
)
def test_merged_logits_are_those_of_peft_beside_the_model(
    tiny_folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = saved_adapter(tiny_folder, tmp_path / "adapter", **options)
    merged = load(tiny_folder, tmp_path / "adapter").model
    assert (logits_of(load(tiny_folder).model) - expected).abs().max() > 1e-3  # the adapter does something
    torch.testing.assert_close(logits_of(merged), expected, rtol=0, atol=1e-4)
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    assert not any(parameter.requires_grad for parameter in merged.parameters())


def test_a_merged_model_is_of_the_dtype_that_was_asked_for(tiny_folder: Path, tmp_path: Path) -> None:
    expected = saved_adapter(tiny_folder, tmp_path / "adapter")
    merged = load(tiny_folder, tmp_path / "adapter", torch.bfloat16).model
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits_of(merged).float(), expected, rtol=0, atol=0.02)


def test_nothing_is_said_on_the_way(tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved_adapter(tiny_folder, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tiny_folder, tmp_path / "adapter")
    assert capfd.readouterr() == ("", "")


def changed(folder: Path, **config: Any) -> None:
    written = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**written, **config}))


def test_what_is_no_adapter_is_told_with_what_is_wanted(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere is not a folder"):
        load(tiny_folder, tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match=r"folder with adapter_config\.json; .*tiny has none"):
        load(tiny_folder, tiny_folder)


def test_an_adapter_of_another_type_is_refused_by_its_name(tiny_folder: Path, tmp_path: Path) -> None:
    saved_adapter(tiny_folder, tmp_path)
    changed(tmp_path, peft_type="IA3")
    with pytest.raises(UnsupportedModelError, match="type 'IA3'; supported: 'LORA'"):
        load(tiny_folder, tmp_path)


@pytest.mark.parametrize("option", NOT_MERGEABLE)
def test_a_variant_that_is_no_fixed_difference_is_refused_by_its_option(
    tiny_folder: Path, tmp_path: Path, option: str
) -> None:
    assert hasattr(peft.LoraConfig(), option)  # PEFT still calls it so
    saved_adapter(tiny_folder, tmp_path)
    changed(tmp_path, **{option: [1, 2]})
    with pytest.raises(UnsupportedModelError, match=f"cannot be merged: it has {option}$"):
        load(tiny_folder, tmp_path)


def test_an_adapter_of_another_base_is_told(tiny_folder: Path, tmp_path: Path) -> None:
    saved_adapter(tiny_folder, tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    save_file({name: weight.repeat(2, 2) for name, weight in weights.items()}, tmp_path / WEIGHTS)
    with pytest.raises(DamagedModelError, match=r"does not fit the model: .*size mismatch"):
        load(tiny_folder, tmp_path)


def test_target_modules_that_the_model_lacks_are_told(tiny_folder: Path, tmp_path: Path) -> None:
    saved_adapter(tiny_folder, tmp_path)
    changed(tmp_path, target_modules=["query_key_value"])
    with pytest.raises(DamagedModelError, match=r"does not fit the model: .*query_key_value"):
        load(tiny_folder, tmp_path)


def test_an_adapter_of_more_layers_than_the_model_has_is_told(tiny_folder: Path, tmp_path: Path) -> None:
    saved_adapter(tiny_folder, tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    deeper = {name.replace("layers.1.", "layers.7."): weight.clone() for name, weight in weights.items()}
    save_file({**weights, **deeper}, tmp_path / WEIGHTS)
    with pytest.raises(DamagedModelError, match=r"no place for .*layers\.7\.self_attn.*\(4 in all\)"):
        load(tiny_folder, tmp_path)


def test_weights_that_are_not_there_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    saved_adapter(tiny_folder, tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    save_file(
        {name: weight for name, weight in weights.items() if "layers.1.self_attn.v_proj" not in name},
        tmp_path / WEIGHTS,
    )
    with pytest.raises(DamagedModelError, match=r"lacks .*layers\.1\.self_attn\.v_proj.*\(2 in all\)"):
        load(tiny_folder, tmp_path)


def test_numbers_that_are_not_finite_are_told(tiny_folder: Path, tmp_path: Path) -> None:
    saved_adapter(tiny_folder, tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    save_file({name: torch.full_like(weight, float("nan")) for name, weight in weights.items()}, tmp_path / WEIGHTS)
    with pytest.raises(DamagedModelError, match="cannot be merged"):
        load(tiny_folder, tmp_path)


def test_pickled_and_broken_weights_are_not_read(tiny_folder: Path, tmp_path: Path) -> None:
    saved_adapter(tiny_folder, tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"broken")
    with pytest.raises(DamagedModelError, match="cannot be read"):
        load(tiny_folder, tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / PICKLED_WEIGHTS)
    with pytest.raises(UnsupportedModelError, match=r"pickled weights only \(adapter_model\.bin\)"):
        load(tiny_folder, tmp_path)
    (tmp_path / PICKLED_WEIGHTS).unlink()
    with pytest.raises(ModelNotFoundError, match=r"no adapter_model\.safetensors"):
        load(tiny_folder, tmp_path)


def test_without_peft_the_extra_is_named(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_adapter(tiny_folder, tmp_path)
    monkeypatch.setattr(lora, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'ropewalk\[lora\]'"):
        load(tiny_folder, tmp_path)
