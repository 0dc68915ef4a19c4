"""Weight-only quantisation of a loaded model, with torchao.

Knows torchao's configurations, and on which devices they have kernels. Does not know where a model came from.
"""

from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from model_patches.errors import UnsupportedModelError

Quantization = Literal["int8", "int4"]
INT4_GROUP = 64
"""Weights that share a scale and a zero point. An int8 scale is that of a whole row."""


def check_quantization(kind: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse what cannot be run, before anything is loaded.

    Raises:
        UnsupportedModelError: torchao is not installed, or has no kernel for the device or the dtype.
    """
    if kind == "int4" and device.type == "cpu":
        raise UnsupportedModelError(
            "quantization int4 does not run on a CPU: torchao's int4 weights have no kernel there; use int8, or no "
            "quantization, which is faster on a CPU"
        )
    if kind == "int4" and dtype != torch.bfloat16:
        raise UnsupportedModelError(
            f"quantization int4 needs dtype bfloat16, which its kernel multiplies; it is {dtype}"
        )
    if find_spec("torchao") is None:
        raise UnsupportedModelError(f"quantization {kind} needs the extra quant: pip install 'ropewalk[quant]'")


def quantize(model: nn.Module, kind: Quantization) -> None:
    """Quantise the weights of all linear layers in place. Embedding, head, norms and activations stay as they are.

    Args:
        model: a `PreTrainedModel` for causal language modelling, on its device.
        kind: int8: symmetric, a scale for each row; int4: asymmetric, a scale for each `INT4_GROUP` weights of a row.

    Raises:
        UnsupportedModelError: the model keeps experts, which are no linear layers; or a row that int4 does not divide.
    """
    layers = _linear_layers(model)
    _check_layers(model, layers, kind)
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config: Any = (
        Int8WeightOnlyConfig(set_inductor_config=False)
        if kind == "int8"
        else Int4WeightOnlyConfig(
            group_size=INT4_GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    )
    chosen = set(map(id, layers.values()))
    quantize_(model, config, filter_fn=lambda module, _name: id(module) in chosen)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers as they are stored; what modules share counts once."""
    return sum(map(_bytes, model.parameters())) + sum(map(_bytes, model.buffers()))


def _linear_layers(model: Any) -> dict[str, nn.Linear]:
    head = model.get_output_embeddings()
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}


def _check_layers(model: nn.Module, layers: dict[str, nn.Linear], kind: Quantization) -> None:
    if any(parameter.ndim > 2 for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"quantization {kind} takes linear layers only, and most weights of this model are those of experts"
        )
    if not layers:
        raise UnsupportedModelError(
            f"quantization {kind} takes linear layers only, and {type(model).__name__} has products of another kind"
        )
    for name, layer in layers.items():
        if kind == "int4" and layer.in_features % INT4_GROUP:
            raise UnsupportedModelError(
                f"quantization int4 needs rows of a multiple of {INT4_GROUP} weights; {name} has {layer.in_features}"
            )


def _bytes(tensor: torch.Tensor) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    # Of a tensor that is split over processes this one's part, and the mesh of all of them, which is no tensor.
    parts = (getattr(tensor, name) for name in names)
    return sum(_bytes(part) for part in parts if isinstance(part, torch.Tensor))
