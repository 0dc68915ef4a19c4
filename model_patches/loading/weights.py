"""transformers' weight loading, with its silent failures made loud.

Knows `from_pretrained`. Does not know which folder or file, or why.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_patches.errors import DamagedModelError, UnsupportedModelError

KNOWN_SCHEMES = frozenset({"default", *ROPE_INIT_FUNCTIONS})  # to transformers


def stand_in_config(config: Mapping[str, Any], *, named: Path) -> PreTrainedConfig | None:
    """A config to load weights with, where transformers does not know the model's rope scheme: the default one takes
    its place, which changes nothing, for the rotary module that would read it is replaced after loading.

    Args:
        config: the content of config.json.
        named: what error messages call the model.

    Returns:
        None where transformers knows the scheme, so that the model's own config will do.

    Raises:
        DamagedModelError: transformers cannot make a config of it.
    """
    block = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if (block.get("rope_type") or block.get("type") or "default") in KNOWN_SCHEMES:
        return None
    kept = {name: block[name] for name in ("rope_theta", "partial_rotary_factor") if name in block}
    known = {**config, "rope_scaling": None, "rope_parameters": {**kept, "rope_type": "default"}}
    try:
        return AutoConfig.for_model(**known)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise DamagedModelError(f"the config of {named} cannot be used: {error}") from error


def load_weights(folder: Path, *, named: Path, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(folder, **options)`, with every weight from the files.

    Args:
        named: what error messages call the model.

    Raises:
        DamagedModelError: weights that cannot be read, do not fit the config, or are missing.
        UnsupportedModelError: they are more than the device can hold.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    except torch.OutOfMemoryError as error:
        raise UnsupportedModelError(f"{named} does not fit into the device's memory: {error}") from error
    except (OSError, SafetensorError) as error:
        raise DamagedModelError(f"the weights of {named} cannot be read: {error}") from error
    except (RuntimeError, ValueError, IndexError, StrictDataclassError) as error:
        raise DamagedModelError(f"the weights of {named} do not fit its config: {error}") from error
    model: PreTrainedModel
    model, report = loaded
    # transformers fills what is missing with random numbers and goes on.
    if missing := sorted(report["missing_keys"]):
        raise DamagedModelError(f"the weights of {named} lack {', '.join(missing[:5])} ({len(missing)} in all)")
    return model
