"""What does not go with a model that is split, told at start and by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.tensor_parallel import check_tensor_parallel
from service import build
from service.distributed.refusals import check_split
from service.errors import StartupError
from service.evaluation.assembly import assemble
from service.settings import Settings
from tests.reference.supported import FAMILIES, SCALED

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1000,
    "rope_theta": 10000.0,
}


def inspect(folder: Path, config: dict[str, Any], **settings: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    build.inspect(Settings.model_validate({"model": str(folder), "device": "cpu", "dtype": "float32", **settings}))


def test_what_splits_is_accepted(tmp_path: Path) -> None:
    inspect(tmp_path, CONFIG, tensor_parallel=2)


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tensor_parallel \(4\) must divide num_key_value_heads .* which is 2"):
        inspect(tmp_path, CONFIG, tensor_parallel=4)


@pytest.mark.parametrize(
    ("name", "value"), [("deterministic", True), ("lora_adapter", Path("folder")), ("quantization", "int8")]
)
def test_what_needs_whole_weights_is_refused(name: str, value: Any) -> None:
    settings = Settings.model_validate({"tensor_parallel": 2, name: value})
    with pytest.raises(StartupError, match=rf"{name} \({value}\) .* does not go with tensor_parallel \(2\)"):
        check_split(settings, torch.device("cpu"))


def test_a_cpu_beside_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(StartupError, match="device is cpu, but torch sees CUDA devices"):
        inspect(tmp_path, CONFIG, tensor_parallel=2)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(StartupError, match=r"tensor_parallel \(2\) needs 2 CUDA devices here, torch sees 1"):
        inspect(tmp_path, CONFIG, tensor_parallel=2, device="cuda")


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("stablelm, half of each head", "no plan to split the layers of stablelm"),
        ("gpt-oss, yarn without truncation", "no plan to split the layers of gpt_oss"),
        ("cohere, norms of queries and keys", "leaves norms of all heads"),
    ],
)
def test_families_whose_layers_stay_whole_are_refused(family: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        check_tensor_parallel({**FAMILIES, **SCALED}[family].to_dict(), 2)


def test_a_config_that_transformers_does_not_know_is_no_fault_of_the_program() -> None:
    with pytest.raises(DamagedModelError, match="the model's config cannot be used"):
        check_tensor_parallel({"architectures": ["LlamaForCausalLM"]}, 2)


def test_evaluation_runs_in_one_process(tmp_path: Path) -> None:
    settings = Settings.model_validate({"tensor_parallel": 2, "device": "cpu", "model": str(tmp_path)})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(StartupError, match=r"tensor_parallel \(2\): evaluation runs in one process"):
        assemble(settings, build.inspect(settings), 100)


def test_heads_that_the_plan_gathers_need_not_divide() -> None:
    check_tensor_parallel(FAMILIES["olmo2"].to_dict(), 4)


def test_heads_of_models_without_key_heads_of_their_own_are_counted() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tensor_parallel \(4\) must divide num_attention_heads"):
        check_tensor_parallel(FAMILIES["gpt-neox, half of each head"].to_dict(), 4)
