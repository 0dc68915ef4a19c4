"""A GGUF file's weights in a model of transformers, unpacked to bfloat16.

Knows tensor names, as the `gguf` package has them from llama.cpp. Does not know families or metadata.
"""

import re
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.gguf_file import GgufFile
from model_patches.loading.gguf_layouts import Layout
from model_patches.loading.gguf_rope import ROPE_TENSORS

_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")


def load_gguf_weights(file: GgufFile, config: PreTrainedConfig, layout: Layout, *, named: Path) -> PreTrainedModel:
    """A model on the CPU with every weight from the file, and no tensor of the file left over.

    Args:
        file: of any number of parts.
        config: of the model, with tied embeddings where the file has no output matrix.
        layout: undoes what llama.cpp's converter did to the family's weights.
        named: what error messages call the model.

    Raises:
        DamagedModelError: weights are missing or do not fit the config.
        UnsupportedModelError: the file has tensors that the model has no place for.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (RuntimeError, ValueError) as error:
        raise DamagedModelError(f"{named} does not describe a model of its architecture: {error}") from error
    names = _names(file)
    sources = {name: _sources(name, names) for name, _ in model.named_parameters()}
    _check_complete(file, sources, named)
    weights = {}
    for name, parameter in model.named_parameters():
        stored = [values for source in sources[name] if (values := file.floats(source)) is not None]
        try:
            values = layout(name, stored[0] if len(stored) == 1 else np.concatenate(stored, axis=1), config)
        except ValueError as error:
            raise DamagedModelError(f"{', '.join(sources[name])} of {named} cannot be {name}: {error}") from error
        if np.squeeze(values).shape != parameter.squeeze().shape:  # the converter drops dimensions of one
            raise DamagedModelError(
                f"the weights of {named} do not fit its config: {', '.join(sources[name])} gives "
                f"{list(values.shape)} for {name}, expected {list(parameter.shape)}"
            )
        weights[name] = torch.from_numpy(values.copy()).bfloat16().reshape(parameter.shape)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model


def _names(file: GgufFile) -> TensorNameMap:
    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    return get_tensor_name_map(architectures[file.architecture], file.count("block_count"))


def _sources(name: str, names: TensorNameMap) -> list[str]:
    """The file's tensors that make up a weight of the model: two where gates and ups of experts are joined."""
    if experts := _EXPERTS.fullmatch(name):
        layer, which, bias = experts.groups()
        return [f"blk.{layer}.ffn_{part}_exps.{'bias' if bias else 'weight'}" for part in which.split("_")]
    module, _, kind = name.rpartition(".")
    for known in (module, module.removeprefix("transformer.")):  # BLOOM's names are there without it
        if (found := names.get_name(known)) is not None:
            return [f"{found}.{kind}"]
    return [f"{names.get_name(name)}.weight"]  # a bare parameter, such as sinks


def _check_complete(file: GgufFile, sources: dict[str, list[str]], named: Path) -> None:
    there = set(file.tensor_types)
    read = {tensor for needed in sources.values() for tensor in needed} | ROPE_TENSORS
    if over := sorted(there - read):  # first: where other tensors are there instead, nothing is damaged
        raise UnsupportedModelError(
            f"{named} has tensors for which models of the architecture {file.architecture!r} have no place here: "
            f"{', '.join(over[:5])} ({len(over)} in all); use the model's Hugging Face folder instead"
        )
    if missing := [name for name, needed in sources.items() if not there.issuperset(needed)]:
        raise DamagedModelError(f"the weights of {named} lack {', '.join(missing[:5])} ({len(missing)} in all)")
