"""A GGUF model → a Hugging Face folder with bfloat16 safetensors, which loads many times faster.

Knows GGUF and transformers. Does not know where the folder is kept, or when it counts as complete.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from tqdm import tqdm
from transformers import AutoConfig, GgufConfig, PreTrainedConfig

from model_patches.errors import UnsupportedModelError
from model_patches.loading.gguf_file import GgufFile
from model_patches.loading.gguf_parts import parts_of, write_merged
from model_patches.loading.gguf_rope import rope_scaling_of
from model_patches.loading.gguf_tokenizer import tokenizer_from_gguf
from model_patches.loading.weights import load_weights
from model_patches.rope_config import read_geometry

GGUF_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""Families of which transformers' reader, with what is added to it here, takes over all that changes an answer."""
_MIXTURES = ("qwen2moe", "qwen3moe")

_END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def convert_gguf(path: Path, folder: Path) -> None:
    """Write config, weights, tokenizer, chat template and generation_config of a GGUF model into `folder`.

    Progress is shown on stderr. The weights are dequantised, so the folder takes two bytes a parameter; meanwhile that
    of a model in several files holds a copy of them too.

    Args:
        path: the file, or any of a model's parts where all are in one folder.
        folder: empty.

    Raises:
        UnsupportedModelError: an architecture, quantisation, tokenizer or positional scaling that cannot be taken over.
        DamagedModelError: a file is cut short, or parts or weights are missing.
    """
    parts = parts_of(path)
    with tqdm(
        total=4, desc=f"converting {path.name}", unit="step", bar_format="{desc}: {n}/{total} {postfix}"
    ) as steps:
        steps.set_postfix_str("reading metadata")
        file = GgufFile(parts)
        check_gguf(file)
        config = _config_of(file)
        read_geometry(config.to_dict())
        tokenizer = tokenizer_from_gguf(file.path, file.metadata)
        steps.update()
        steps.set_postfix_str("unpacking weights")
        with _in_one_file(file, folder) as whole:
            model = load_weights(
                whole.parent,
                named=path,
                gguf_file=whole.name,
                config=config,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
            )
        steps.update()
        steps.set_postfix_str("writing weights")
        model.save_pretrained(folder)
        steps.update()
        steps.set_postfix_str("writing tokenizer")
        tokenizer.save_pretrained(folder)
        _write_generation_config(file, folder)
        steps.update()
        steps.set_postfix_str("done")
    for written in folder.glob("*.safetensors"):
        written.chmod(0o644)  # safetensors makes them readable by their owner alone


def check_gguf(file: GgufFile) -> None:
    """Refuse what would convert into something else than the file holds.

    Raises:
        UnsupportedModelError: the message names the architecture, or the tensor and its type, and what is supported.
    """
    supported = ", ".join(GGUF_ARCHITECTURES)
    if file.architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} is a GGUF file of the architecture {file.architecture!r}; supported: {supported}"
        )
    experts = file.of_architecture("expert_count")
    if experts and file.architecture not in _MIXTURES:
        raise UnsupportedModelError(
            f"{file.path} is a mixture of {experts} experts under the architecture {file.architecture!r}; "
            f"supported are mixtures of {', '.join(_MIXTURES)}"
        )
    _check_tensor_types(file)
    _check_head(file)


def _check_tensor_types(file: GgufFile) -> None:
    unread = {kind for kind in GGMLQuantizationType if not _is_read(kind)}
    for name, kind in file.tensor_types.items():
        if kind in unread:
            read = ", ".join(sorted(known.name for known in GGMLQuantizationType if known not in unread))
            raise UnsupportedModelError(
                f"{file.path} stores {name} as {kind.name}, which cannot be unpacked; what can is {read}"
            )


def _is_read(kind: GGMLQuantizationType) -> bool:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _check_head(file: GgufFile) -> None:
    """transformers' reader keeps one head width only, and takes it for the rotary and the value width as well."""
    for key in ("attention.value_length", "rope.dimension_count"):
        if (width := file.of_architecture(key)) not in (None, _head_dim(file)):
            raise UnsupportedModelError(
                f"{file.path} has heads {_head_dim(file)} wide but {file.architecture}.{key} {width}, "
                "which cannot be read from a GGUF file; use the model's Hugging Face folder instead"
            )


def _head_dim(file: GgufFile) -> int:
    own = file.of_architecture("attention.key_length")
    return int(own or file.required("embedding_length") // file.required("attention.head_count"))


def _config_of(file: GgufFile) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name)
    config.architectures = [GGUF_ARCHITECTURES[file.architecture]]
    config.head_dim = _head_dim(file)
    config.pad_token_id = None  # by default it is another model's, maybe beyond this vocabulary; nothing is padded
    # What follows the reader leaves at its classes' defaults.
    if hasattr(config, "sliding_window"):
        config.sliding_window = file.of_architecture("attention.sliding_window")
    if file.architecture in _MIXTURES:
        config.moe_intermediate_size = file.required("expert_feed_forward_length")
    if file.architecture == "qwen2moe":
        config.shared_expert_intermediate_size = file.required("expert_shared_feed_forward_length")
    config.rope_parameters = {**config.rope_parameters, **rope_scaling_of(file)}
    return config


@contextmanager
def _in_one_file(file: GgufFile, folder: Path) -> Iterator[Path]:
    """transformers reads weights from one file: where the model has several, one is made of them in `folder`."""
    if len(file.parts) == 1:
        yield file.path
        return
    merged = folder / "merged.gguf"
    try:
        write_merged(file.parts, merged)
        yield merged
    finally:
        merged.unlink(missing_ok=True)


def _write_generation_config(file: GgufFile, folder: Path) -> None:
    ends = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_TOKEN_KEYS]
    settings = {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(number for number in ends if number is not None)),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    text = json.dumps({key: value for key, value in settings.items() if value not in (None, [])}, indent=2)
    (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
