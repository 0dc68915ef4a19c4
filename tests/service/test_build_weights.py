"""What is done to a model's weights between its files and the model that serves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import save_file

from model_patches.loading.load import load_model
from model_patches.loading.lora import CONFIG, WEIGHTS
from service import build
from service.build import inspect, load, load_weights
from service.errors import StartupError
from service.evaluation.assembly import assemble
from service.metrics import Metrics
from service.settings import Settings

TARGET = "model.layers.3.self_attn.o_proj"
SCALE, RANK = 24, 2


def settings_for(folder: Path, **changes: Any) -> Settings:
    common = {"model": str(folder), "device": "cpu", "kv_cache_memory": "64MiB", "max_model_len": 64}
    return Settings.model_validate({**common, **changes})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter of one layer of the default model, written without PEFT."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE, "target_modules": [TARGET]}
    (folder / CONFIG).write_text(json.dumps(config))
    down, up = torch.randn(RANK, 576) * 0.05, torch.randn(576, RANK) * 0.05
    prefix = f"base_model.model.{TARGET}"
    save_file({f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}, folder / WEIGHTS)
    torch.save((down, up), tmp_path / "difference")
    return folder


class SeenError(Exception):
    """Carries what the patched model would have been made of."""


def test_an_adapter_is_in_the_weights_before_they_are_fused(
    monkeypatch: pytest.MonkeyPatch, embedded_model_folder: Path, adapter: Path
) -> None:
    def patch(model: Any, *_: Any, fuse: bool, **__: Any) -> None:
        raise SeenError(model.get_submodule(TARGET).weight, fuse)

    monkeypatch.setattr(build, "PatchedModel", patch)
    chosen = settings_for(embedded_model_folder, lora_adapter=str(adapter), dtype="float32")
    with pytest.raises(SeenError) as seen:
        load_weights(chosen, inspect(chosen))
    found, fuse = seen.value.args
    down, up = torch.load(adapter.parent / "difference", weights_only=True)
    plain = load_model(embedded_model_folder, dtype=torch.float32, device=torch.device("cpu")).model
    expected = plain.get_submodule(TARGET).weight + SCALE / RANK * (up @ down)
    assert fuse
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_server_starts_with_an_adapter(
    embedded_model_folder: Path, adapter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = settings_for(embedded_model_folder, lora_adapter=str(adapter))
    load(chosen, inspect(chosen), Metrics(CollectorRegistry())).engine.stop()  # runs a prefill and a decode to warm up
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_adapter": "/nowhere"}, "lora_adapter must be a folder.*/nowhere is not"),
        ({"quantization": "int4"}, "int4 does not run on a CPU"),
    ],
)
def test_what_cannot_be_done_to_weights_is_told_before_they_are_read(
    embedded_model_folder: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(StartupError, match=said):
        inspect(settings_for(embedded_model_folder, **changes))


def test_an_evaluations_numbers_are_told_apart_by_what_was_done_to_the_weights(
    embedded_model_folder: Path, adapter: Path
) -> None:
    def identity(**changes: Any) -> dict[str, Any]:
        chosen = settings_for(embedded_model_folder, **changes)
        return assemble(chosen, inspect(chosen), 64).identity

    plain, adapted = identity(), identity(lora_adapter=str(adapter))
    assert (plain["lora_adapter"], plain["quantization"]) == (None, None)
    assert adapted == {**plain, "lora_adapter": adapted["lora_adapter"]} != plain
    (adapter / CONFIG).write_text((adapter / CONFIG).read_text().replace(str(SCALE), str(SCALE + 1)))
    assert identity(lora_adapter=str(adapter))["lora_adapter"] != adapted["lora_adapter"]


def test_float16_is_for_cuda() -> None:
    assert build._dtype("fp16", torch.device("cuda"), {}) is torch.float16
    assert build._dtype("auto", torch.device("cuda"), {"dtype": "float16"}) is torch.float16
    assert build._dtype("auto", torch.device("cpu"), {"dtype": "float16"}) is torch.bfloat16
    with pytest.raises(StartupError, match="float16 has no fast path on a CPU"):
        build._dtype("float16", torch.device("cpu"), {})


@pytest.mark.long
def test_quantised_weights_are_served_unfused_and_counted_as_stored(embedded_model_folder: Path) -> None:
    pytest.importorskip("torchao")
    chosen = settings_for(embedded_model_folder, quantization="int8", dtype="bfloat16")
    metrics = Metrics(CollectorRegistry())
    server = load(chosen, inspect(chosen), metrics)
    server.engine.stop()
    assert metrics.memory.held["weights"] == pytest.approx(2 * 49152 * 576 + 30 * 3_538_944, rel=0.01)
    evaluated = assemble(chosen, inspect(chosen), 64)
    assert evaluated.identity["quantization"] == "int8"
    assert not load_weights(chosen, inspect(chosen)).model.is_fused
