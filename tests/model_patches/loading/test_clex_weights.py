"""The two tensors of CLEX are read from a folder, single or in shards, without the rest; what is wrong is said."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.loading.clex_weights import read_clex_weights, with_clex_weights
from model_patches.plan import make_plan

UP, DOWN = "model.clex_layer.proj_func.ode_up_proj", "model.clex_layer.proj_func.ode_down_proj"
GEOMETRY = RopeGeometry(8, 1e4, 2048, 2048, "clex", parameters={"max_factor": 16, "param_factor": 2, "act": "silu"})


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    up, down = torch.randn(4, 16, generator=generator), torch.randn(16, 4, generator=generator) * 0.01
    return {UP: up, DOWN: down, "model.norm.weight": torch.ones(8)}


def write_index(folder: Path, shards: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_single_file(tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    save_file({name: values.to(dtype) for name, values in tensors.items()}, tmp_path / "model.safetensors")
    weights = read_clex_weights(tmp_path)
    assert weights.keys() == {"ode_up_proj", "ode_down_proj"}
    for option, name in (("ode_up_proj", UP), ("ode_down_proj", DOWN)):
        assert weights[option].dtype == np.float64
        assert weights[option].tolist() == tensors[name].to(dtype).double().tolist()


def test_shards_of_which_only_those_needed_are_opened(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({UP: tensors[UP]}, tmp_path / "model-00002-of-00003.safetensors")
    save_file({DOWN: tensors[DOWN]}, tmp_path / "model-00003-of-00003.safetensors")
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(b"never opened")
    shards = {"model.norm.weight": "model-00001-of-00003.safetensors", UP: "model-00002-of-00003.safetensors"}
    write_index(tmp_path, shards | {DOWN: "model-00003-of-00003.safetensors"})
    weights = read_clex_weights(tmp_path)
    assert weights["ode_up_proj"].tolist() == tensors[UP].double().tolist()
    assert weights["ode_down_proj"].tolist() == tensors[DOWN].double().tolist()


@pytest.mark.parametrize("missing", [UP, DOWN])
def test_a_missing_tensor_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], missing: str) -> None:
    some = {name: values for name, values in tensors.items() if name != missing}
    save_file(some, tmp_path / "model-1.safetensors")
    write_index(tmp_path, dict.fromkeys(some, "model-1.safetensors"))
    with pytest.raises(DamagedModelError, match=f"lack {missing}, which scheme 'clex' needs"):
        read_clex_weights(tmp_path)
    write_index(tmp_path, dict.fromkeys(tensors, "model-1.safetensors"))  # says what is not so
    with pytest.raises(DamagedModelError, match=f"model-1.safetensors lack {missing}"):
        read_clex_weights(tmp_path)
    save_file(some, tmp_path / "model.safetensors")
    with pytest.raises(DamagedModelError, match=f"model.safetensors lack {missing}"):
        read_clex_weights(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"'clex' needs trained weights .* has neither model.safetensors"):
        read_clex_weights(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedModelError, match=r"model\.safetensors cannot be read"):
        read_clex_weights(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_index(tmp_path, {UP: "gone.safetensors", DOWN: "gone.safetensors"})
    with pytest.raises(DamagedModelError, match=r"gone\.safetensors cannot be read"):
        read_clex_weights(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [("{", "not valid JSON"), ("{}", "no weight_map"), ('{"weight_map": 3}', "no weight_map"), ("[]", "JSON object")],
)
def test_a_damaged_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DamagedModelError, match=message):
        read_clex_weights(tmp_path)


def test_with_its_weights_a_geometry_makes_plans(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="trained weights"):
        make_plan(GEOMETRY, "clex", 2.0, 4096)
    trained = with_clex_weights(GEOMETRY, read_clex_weights(tmp_path))
    assert make_plan(trained, "clex", 2.0, 4096) != make_plan(trained, "ntk", 3.0, 4096)
    assert trained.options("clex")["max_factor"] == 16


def test_geometries_with_weights_are_compared_and_hashed(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    one, same = (with_clex_weights(GEOMETRY, read_clex_weights(tmp_path)) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    assert one != GEOMETRY
    other = read_clex_weights(tmp_path)
    other["ode_up_proj"][0, 0] += 1
    assert one != with_clex_weights(GEOMETRY, other)


@pytest.mark.parametrize(
    ("up", "down"), [((4, 8), (8, 4)), ((5, 16), (16, 5)), ((4, 16), (4, 16)), ((16, 4), (16, 4)), ((64,), (64,))]
)
def test_weights_of_another_shape_are_refused(up: tuple[int, ...], down: tuple[int, ...]) -> None:
    with pytest.raises(DamagedModelError, match=r"do not fit the config: .* must be \(4, 16\) and \(16, 4\)"):
        with_clex_weights(GEOMETRY, {"ode_up_proj": np.ones(up), "ode_down_proj": np.ones(down)})


def test_without_param_factor_any_hidden_size_will_do() -> None:
    plain = RopeGeometry(8, 1e4, 2048, 2048, "clex", parameters={"max_factor": 16})
    trained = with_clex_weights(plain, {"ode_up_proj": np.ones((4, 3)), "ode_down_proj": np.ones((3, 4))})
    assert len(trained.options("clex")["ode_down_proj"]) == 3
    with pytest.raises(DamagedModelError, match="do not fit"):
        with_clex_weights(plain, {"ode_up_proj": np.ones((4, 3)), "ode_down_proj": np.ones((2, 4))})


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("option", ["ode_up_proj", "ode_down_proj"])
def test_weights_that_are_not_finite_are_refused(option: str, value: float) -> None:
    weights = {"ode_up_proj": np.ones((4, 16)), "ode_down_proj": np.ones((16, 4))}
    weights[option][2, 3] = value
    with pytest.raises(DamagedModelError, match="not all finite"):
        with_clex_weights(GEOMETRY, weights)
