"""A Hugging Face folder → model and tokenizer in memory, ready to be patched.

Knows transformers' loading. Does not know where the folder came from or what will be patched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.checkpoint import check_config, check_weights, read_config
from model_patches.loading.generation import GenerationDefaults, read_generation_defaults
from model_patches.loading.lora import check_adapter, merge_adapter
from model_patches.loading.quantize import Quantization, check_quantization, quantize
from model_patches.loading.quiet import quiet_transformers
from model_patches.loading.weights import load_weights, stand_in_config
from model_patches.tensor_parallel import check_tensor_parallel


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        model: in eval mode, on its device, without gradients.
        tokenizer: backed by the tokenizers library.
        config: config.json as it stands in the folder.
        generation: what the folder says about stopping and sampling.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    config: Mapping[str, Any]
    generation: GenerationDefaults


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    adapter: Path | None = None,
    quantization: Quantization | None = None,
    tensor_parallel: int = 1,
) -> LoadedModel:
    """Load a folder that has config.json, safetensors and a tokenizer. Reads nothing from the network.

    Args:
        folder: of the model.
        dtype: of weights and activations.
        device: where the model will be.
        trust_remote_code: whether Python code in the folder may run.
        adapter: folder of a LoRA adapter that is merged into the weights.
        quantization: of the weights, after that.
        tensor_parallel: processes that the weights are split over; more than 1 are the default group of
            torch.distributed, this one of them.

    Raises:
        UnsupportedModelError: the model, the adapter, the quantisation or the split is refused; see `checkpoint`,
            `lora`, `quantize` and `tensor_parallel`.
        ModelNotFoundError: the folder has no config.json or no weights, or there is no adapter.
        DamagedModelError: files that cannot be read or used, or weights that are missing.
    """
    if adapter is not None:
        check_adapter(adapter)
    if quantization is not None:
        check_quantization(quantization, device, dtype)
    config = read_config(folder)
    check_config(config, trust_remote_code=trust_remote_code)
    check_weights(folder)
    if tensor_parallel > 1:
        check_tensor_parallel(config, tensor_parallel)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    with quiet_transformers():
        model = load_weights(
            folder,
            named=folder,
            config=stand_in_config(config, named=folder),
            dtype=dtype,
            **_placement(device, tensor_parallel),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    if adapter is not None:
        merge_adapter(model, adapter)
    if quantization is not None:
        quantize(model, quantization)
    model.requires_grad_(False)
    model.eval()
    generation = read_generation_defaults(folder, config, tokenizer.eos_token_id)
    return LoadedModel(model, tokenizer, config, generation)


def _placement(device: torch.device, tensor_parallel: int) -> dict[str, Any]:
    """Where the weights go, as `from_pretrained` takes it; a split model is on the device type of its group."""
    if tensor_parallel == 1:
        return {"device_map": {"": device}}
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=tensor_parallel)}


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """Load the folder's tokenizer alone.

    Raises:
        UnsupportedModelError: it is not backed by the tokenizers library, which streaming needs.
        DamagedModelError: it is not there, or cannot be read.
    """
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise DamagedModelError(f"the tokenizer in {folder} cannot be read: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedModelError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) is not backed by the tokenizers library; "
            "a tokenizer.json is needed"
        )
    # Some fine-tunes save what they were trained with; here a prompt is never cut short or padded.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
