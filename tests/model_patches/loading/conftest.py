"""A model of a few kilobytes, as a GGUF file and as a Hugging Face folder, from the same weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.model_patches.loading.llama_cpp import tensors_of

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 32, 4, 2, 48
THETA = 500_000.0
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<\uff5cUser\uff5c>"]
MAKERS_OWN = ["<think>"]
MERGES = [("Ġ", "Ġ"), ("t", "h"), ("th", "e"), ("Ġ", "the")]

TinyGguf = Callable[..., Path]


def _vocabulary() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *MAKERS_OWN, *alphabet, *("".join(merge) for merge in MERGES)]


@pytest.fixture
def tiny_model() -> LlamaForCausalLM:
    """Tied embeddings, bfloat16, random weights that are the same every time."""
    config = LlamaConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@pytest.fixture
def tiny_folder(tiny_model: LlamaForCausalLM, tmp_path: Path) -> Path:
    """The model as transformers itself writes it, without generation_config.json."""
    folder = tmp_path / "tiny"
    tiny_model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(_vocabulary())}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    make_tokenizer: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    tokenizer = make_tokenizer(tokenizer_object=backend, bos_token=SPECIAL[1], eos_token=SPECIAL[2])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_gguf(tiny_model: LlamaForCausalLM, tmp_path: Path) -> TinyGguf:
    """Writes the model as a GGUF file, or in parts of so many tensors, and returns the first file.

    `metadata` adds keys or replaces them, `without` leaves a tensor out, `stored_as` quantises what matrices it can.
    """

    def write(
        name: str = "tiny.gguf",
        *,
        architecture: str = "llama",
        model: PreTrainedModel | None = None,
        metadata: Mapping[str, Any] | None = None,
        tensors: Mapping[str, NDArray[np.float32]] | None = None,
        without: str | None = None,
        tensors_per_part: int = 0,
        stored_as: gguf.GGMLQuantizationType | None = None,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
        for key, value in ({**_metadata(architecture), **(metadata or {})}).items():
            _add(writer, key, value)
        for key, weights in {**tensors_of(model or tiny_model, architecture), **(tensors or {})}.items():
            if key == without:
                continue
            if stored_as is None or weights.ndim == 1 or weights.shape[-1] % gguf.GGML_QUANT_SIZES[stored_as][0]:
                writer.add_tensor(key, weights)
            else:
                writer.add_tensor(key, gguf.quantize(weights, stored_as), raw_dtype=stored_as)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path if tensors_per_part == 0 else min(tmp_path.glob(f"{path.stem}-00001-of-*.gguf"))

    return write


def _metadata(architecture: str) -> dict[str, Any]:
    vocabulary = _vocabulary()
    kinds = [3] * len(SPECIAL) + [4] * len(MAKERS_OWN)
    return {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": THETA,
        f"{architecture}.rope.dimension_count": HIDDEN // HEADS,
        f"{architecture}.vocab_size": len(vocabulary),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": kinds + [1] * (len(vocabulary) - len(kinds)),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case None:
            pass
