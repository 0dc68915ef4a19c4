"""transformers' weight loading, with its silent failures made loud.

Knows `from_pretrained`. Does not know which folder or file, or why.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_patches.errors import DamagedModelError, UnsupportedModelError


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
    except (RuntimeError, ValueError, IndexError) as error:
        raise DamagedModelError(f"the weights of {named} do not fit its config: {error}") from error
    model: PreTrainedModel
    model, report = loaded
    # transformers fills what is missing with random numbers and goes on.
    if missing := sorted(report["missing_keys"]):
        raise DamagedModelError(f"the weights of {named} lack {', '.join(missing[:5])} ({len(missing)} in all)")
    return model
