"""The weights of scheme "clex" out of a model's folder.

Knows their published names and safetensors. Does not know what is computed with them; that is
`model_patches.schemes.clex`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.loading.checkpoint import read_json_object

# Names in the checkpoints of DAMO-NLP-SG/CLEX, by the scheme's option.
TENSORS: Mapping[str, str] = {
    "ode_up_proj": "model.clex_layer.proj_func.ode_up_proj",
    "ode_down_proj": "model.clex_layer.proj_func.ode_down_proj",
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_clex_weights(folder: Path) -> dict[str, NDArray[np.float64]]:
    """Read the two tensors, whatever dtype they are stored in, and nothing else of the folder's weights.

    Returns:
        `ode_up_proj` [rotary_dim / 2, hidden] and `ode_down_proj` [hidden, rotary_dim / 2], float64.

    Raises:
        UnsupportedModelError: the folder has no safetensors as transformers names them.
        DamagedModelError: files that cannot be read or are missing, or weights without the two tensors.
    """
    if (folder / SINGLE).is_file():
        return {option: _read(folder / SINGLE, name) for option, name in TENSORS.items()}
    if not (folder / INDEX).is_file():
        raise UnsupportedModelError(
            f"scheme 'clex' needs trained weights of its own, but {folder} has neither {SINGLE} nor {INDEX}"
        )
    shards = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(shards, Mapping):
        raise DamagedModelError(f"{folder / INDEX} has no weight_map")
    return {option: _read(folder / _shard(folder, shards, name), name) for option, name in TENSORS.items()}


def with_clex_weights(geometry: RopeGeometry, weights: Mapping[str, NDArray[np.float64]]) -> RopeGeometry:
    """The same geometry with the weights among its options, as tuples: so geometries can still be compared.

    Args:
        geometry: of a model whose config asks for clex.
        weights: what `read_clex_weights` returned.

    Raises:
        DamagedModelError: their shapes do not fit the geometry and its option `param_factor` (hidden = param_factor ×
            rotary_dim; where the config does not say, any hidden size that both share will do), or they hold numbers
            that are not finite.
    """
    up, down = weights["ode_up_proj"], weights["ode_down_proj"]
    pairs = geometry.rotary_dim // 2
    param_factor = geometry.parameters.get("param_factor")
    hidden = up.shape[-1] if param_factor is None else param_factor * geometry.rotary_dim
    if up.shape != (pairs, hidden) or down.shape != (hidden, pairs):
        raise DamagedModelError(
            f"the weights of scheme 'clex' do not fit the config: ode_up_proj is {up.shape} and ode_down_proj "
            f"{down.shape}, for a rotary dimension of {geometry.rotary_dim} and param_factor {param_factor} they "
            f"must be {(pairs, hidden)} and {(hidden, pairs)}"
        )
    if not (np.isfinite(up).all() and np.isfinite(down).all()):
        raise DamagedModelError("the weights of scheme 'clex' are not all finite")
    added = {option: tuple(map(tuple, values.tolist())) for option, values in weights.items()}
    return replace(geometry, parameters={**geometry.parameters, **added})


def _shard(folder: Path, shards: Mapping[str, object], name: str) -> str:
    shard = shards.get(name)
    if not isinstance(shard, str):
        raise DamagedModelError(_lacks(folder, name))
    return shard


def _read(path: Path, name: str) -> NDArray[np.float64]:
    try:
        with safe_open(path, framework="pt") as file:
            if name not in file.keys():  # noqa: SIM118  (it is not a mapping)
                raise DamagedModelError(_lacks(path, name))
            values: NDArray[np.float64] = file.get_tensor(name).to(torch.float64).numpy()
            return values
    except (OSError, SafetensorError) as error:
        raise DamagedModelError(f"the weights in {path} cannot be read: {error}") from error


def _lacks(where: Path, name: str) -> str:
    return f"the weights in {where} lack {name}, which scheme 'clex' needs and the config asks for"
