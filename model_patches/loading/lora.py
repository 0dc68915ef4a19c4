"""A LoRA adapter in PEFT's format, merged into the model that it was trained on.

Knows PEFT. Does not know where the model came from.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from model_patches.errors import DamagedModelError, ModelNotFoundError, UnsupportedModelError
from model_patches.loading.checkpoint import read_json_object

CONFIG, WEIGHTS, PICKLED_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
NOT_MERGEABLE = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("ensure_weight_tying", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
)
"""Options of LoRA variants that are not one fixed difference for each weight, or that tie weights."""


def check_adapter(folder: Path) -> None:
    """Refuse what is no adapter that can be merged, before the model is loaded.

    Raises:
        ModelNotFoundError: no such folder, or it holds no adapter.
        UnsupportedModelError: another kind of adapter, pickled weights, or PEFT is not installed.
        DamagedModelError: its config is not a JSON object.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"lora_adapter must be a folder with {CONFIG}; {folder} is not a folder")
    if not (folder / CONFIG).is_file():
        raise ModelNotFoundError(f"lora_adapter must be a folder with {CONFIG}; {folder} has none")
    config = read_json_object(folder / CONFIG)
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedModelError(f"the adapter {folder} is of the type {kind!r}; supported: 'LORA'")
    if variants := [name for name in NOT_MERGEABLE if config.get(name)]:
        raise UnsupportedModelError(f"the adapter {folder} cannot be merged: it has {', '.join(variants)}")
    if not (folder / WEIGHTS).is_file():
        if (folder / PICKLED_WEIGHTS).is_file():
            raise UnsupportedModelError(
                f"the adapter {folder} has pickled weights only ({PICKLED_WEIGHTS}), which are not loaded; "
                "save it again as safetensors"
            )
        raise ModelNotFoundError(f"the adapter {folder} has no weights: no {WEIGHTS}")
    if find_spec("peft") is None:
        raise UnsupportedModelError("lora_adapter needs the extra lora: pip install 'ropewalk[lora]'")


def merge_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Add an adapter's differences to the weights that they are for, in place and in the weights' dtype.

    Args:
        model: of the adapter's base, not quantised.
        folder: one that `check_adapter` accepts.

    Raises:
        DamagedModelError: the adapter cannot be read, is for another model, or lacks weights.
    """
    import peft

    try:
        weights = load_file(folder / WEIGHTS)
        with _without_advice():
            adapted: Any = peft.PeftModel(model, peft.PeftConfig.from_pretrained(str(folder)))
        found: Any = peft.set_peft_model_state_dict(adapted, weights)
    except (OSError, SafetensorError) as error:
        raise DamagedModelError(f"the adapter {folder} cannot be read: {error}") from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise DamagedModelError(f"the adapter {folder} does not fit the model: {shorten(str(error), 300)}") from error
    if unknown := sorted(found.unexpected_keys):
        raise DamagedModelError(
            f"the adapter {folder} does not fit the model, which has no place for {', '.join(unknown[:3])} "
            f"({len(unknown)} in all)"
        )
    if missing := sorted(name for name in found.missing_keys if "lora_" in name):
        raise DamagedModelError(f"the adapter {folder} lacks {', '.join(missing[:3])} ({len(missing)} in all)")
    _untie_adapted(model)
    try:
        with _without_advice():
            adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:  # numbers that are not finite
        raise DamagedModelError(f"the adapter {folder} cannot be merged: {error}") from error


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence on what is seen to here, or is PEFT's own affair."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


def _untie_adapted(model: PreTrainedModel) -> None:
    """Give the head weights of its own where it shares them with the embedding and one of the two is adapted."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    embedding, head = (getattr(end, "base_layer", end) for end in ends)
    if [embedding, head] == ends:
        return
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
