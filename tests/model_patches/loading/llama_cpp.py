"""What llama.cpp's convert_hf_to_gguf.py makes of a model's weights, written again: names, orders and offsets."""

from collections.abc import Iterator

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

Weights = NDArray[np.float32]

# Of those that rotate neighbouring dimensions of a head, the converters that take the weights from halves.
FROM_HALVES = ("llama", "granite", "smollm3")


def tensors_of(model: PreTrainedModel, architecture: str) -> dict[str, Weights]:
    """All tensors of the file by name, rows before columns, in float32."""
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    number = known.get(architecture, gguf.MODEL_ARCH.LLAMA)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    stored: dict[str, Weights] = {}
    for key, weights in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for name, values in _renamed(key, weights.float().numpy(), architecture):
            module, _, kind = name.rpartition(".")
            found = names.get_name(module) or names.get_name(module.removeprefix("transformer."))
            stored[f"{found}.{kind}"] = np.ascontiguousarray(_reordered(name, values.squeeze(), architecture, model))
    return stored


def _renamed(key: str, values: Weights, architecture: str) -> Iterator[tuple[str, Weights]]:
    if ".experts." not in key:
        yield f"{key}.weight" if key.endswith("sinks") else key, values
        return
    kind = "bias" if key.endswith("_bias") else "weight"
    base = key.removesuffix("_bias").removesuffix("gate_up_proj").removesuffix("down_proj")
    in_turn = architecture == "gpt-oss"
    if in_turn and kind == "weight":
        values = values.swapaxes(1, 2)
    if "down_proj" in key:
        yield f"{base}down_proj.{kind}", values
        return
    gates, ups = (values[:, ::2], values[:, 1::2]) if in_turn else np.split(values, 2, axis=1)
    yield f"{base}gate_proj.{kind}", gates
    yield f"{base}up_proj.{kind}", ups


def _reordered(name: str, values: Weights, architecture: str, model: PreTrainedModel) -> Weights:
    config = model.config
    if architecture in FROM_HALVES and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return values.T
    if architecture in ("bloom", "gptneox") and "query_key_value" in name:
        heads = config.num_attention_heads
        each = values.reshape(heads, 3, config.hidden_size // heads, -1)
        return np.concatenate([each[:, part] for part in range(3)]).reshape(values.shape)
    if architecture == "falcon" and "query_key_value" in name:
        groups = config.num_kv_heads if config.new_decoder_architecture else 1
        heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        each = values.reshape(groups, heads // groups + 2, width, -1)
        rows = [part.reshape(-1, values.shape[1]) for part in (each[:, :-2], each[:, -2], each[:, -1])]
        return np.concatenate(rows)
    return values
