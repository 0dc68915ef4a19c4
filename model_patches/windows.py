"""How far each layer of a model looks back, as its own code says.

Knows what attention modules pass to the attention function. Does not know pages.
"""

from typing import Any

import torch

from model_patches.attention import attending_by, window_of


@torch.inference_mode()
def observe_windows(model: Any) -> tuple[int | None, ...]:
    """Ask each layer of an unfused model, by a pass of one token whose result is not used.

    Configs name windows in several ways, and families read them in several more: what holds is what a layer asks of
    attention.

    Args:
        model: of transformers, with what computes its positions not replaced yet.

    Returns:
        For each layer, how many of the latest tokens it sees, the token itself included; None for all.
    """
    layers: int = model.config.num_hidden_layers
    modules = (getattr(module, "sliding_window", None) for module in model.modules())
    if getattr(model.config, "sliding_window", None) is None and not any(modules):
        return (None,) * layers
    seen: dict[int, int | None] = {}

    def observed(
        module: Any, query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_others: Any, **asked: Any
    ) -> tuple[torch.Tensor, None]:
        seen[module.layer_idx] = window_of(module, asked.get("sliding_window"))
        return value.new_zeros(1, 1, query.shape[1], value.shape[-1]), None

    with attending_by(model, observed):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    return tuple(seen.get(layer) for layer in range(layers))
