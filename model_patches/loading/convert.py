"""A GGUF model → a Hugging Face folder with bfloat16 safetensors, which loads many times faster.

Knows GGUF and transformers. Does not know where the folder is kept, or when it counts as complete.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from huggingface_hub.errors import StrictDataclassError
from tqdm import tqdm
from transformers import PreTrainedConfig

from model_patches.encoding_config import read_positions
from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.gguf_families import GgufFamily, gguf_family
from model_patches.loading.gguf_file import GgufFile
from model_patches.loading.gguf_parts import parts_of
from model_patches.loading.gguf_tokenizer import end_tokens, tokenizer_from_gguf
from model_patches.loading.gguf_weights import load_gguf_weights


def convert_gguf(path: Path, folder: Path) -> None:
    """Write config, weights, tokenizer, chat template and generation_config of a GGUF model into `folder`.

    Progress is shown on stderr. The weights are dequantised, so the folder takes two bytes a parameter.

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
        family = gguf_family(file)
        _check_tensor_types(file)
        config = _config_of(file, family)
        read_positions(config.to_dict())
        tokenizer = tokenizer_from_gguf(file.path, file.metadata)
        steps.update()
        steps.set_postfix_str("unpacking weights")
        model = load_gguf_weights(file, config, family.layout, named=path)
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


def _config_of(file: GgufFile, family: GgufFamily) -> PreTrainedConfig:
    fields = family.config(file)
    config_class: Callable[..., PreTrainedConfig] = getattr(transformers, fields["architectures"][0]).config_class
    ends = {role: file.metadata.get(f"tokenizer.ggml.{role}") for role in ("bos_token_id", "eos_token_id")}
    try:
        # Padding is by default another model's token, maybe beyond this vocabulary; nothing is padded.
        return config_class(**fields, **ends, pad_token_id=None)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise DamagedModelError(f"{file.path} does not describe a model of its architecture: {error}") from error


def _write_generation_config(file: GgufFile, folder: Path) -> None:
    settings = {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(file.metadata),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    text = json.dumps({key: value for key, value in settings.items() if value not in (None, [])}, indent=2)
    (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
