"""Whether a model can be split over several processes, told from its config alone, and what each of them then has.

The split is transformers' own: a model's `tp_plan` says which weights are cut along which dimension (Megatron-LM,
1909.08053, section 3). Knows those plans. Loads no weights.
"""

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.quiet import quiet_transformers


def check_tensor_parallel(config: Mapping[str, Any], size: int) -> None:
    """Refuse a model whose layers transformers would not split over so many processes, or would split wrongly.

    Args:
        config: the content of config.json.
        size: processes.

    Raises:
        UnsupportedModelError: its plan is missing or leaves the layers whole; its heads do not divide by `size`; or it
            norms all heads of a layer with weights of their own, which the plan leaves whole.
        DamagedModelError: transformers cannot make a config of it.
    """
    asked = f"tensor_parallel ({size})"
    model_type = str(config.get("model_type"))
    try:
        with quiet_transformers():
            made: PreTrainedConfig = AutoConfig.for_model(model_type, **_without_rope(config))
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise DamagedModelError(f"the model's config cannot be used: {error}") from error
    plan = {name: style for name, style in (made.base_model_tp_plan or {}).items() if name.startswith("layers.")}
    if not plan:
        raise UnsupportedModelError(f"{asked}: transformers has no plan to split the layers of {model_type} models")
    if getattr(made, "use_qk_norm", False):
        raise UnsupportedModelError(
            f"{asked}: transformers' plan to split {model_type} models leaves norms of all heads (use_qk_norm) whole"
        )
    for name in ("num_key_value_heads", "num_attention_heads"):
        heads = getattr(made, name, None)
        if heads is not None and kv_heads_of_one(plan, heads, size) is None:
            raise UnsupportedModelError(f"{asked} must divide {name} of the model, which is {heads}")


def kv_heads_of_one(plan: Mapping[str, str], heads: int, size: int) -> int | None:
    """How many of a layer's heads of keys each process has: all of them where the plan gathers what it has cut.

    Args:
        plan: a tp_plan of transformers.
        heads: of a layer.
        size: processes.

    Returns:
        None where they do not divide.
    """
    # Imported only here: it brings in torch's distributed tensors, which only such a model needs.
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    found = get_kv_heads_per_rank(dict(plan), heads, size)
    assert not isinstance(found, list)
    return found


def _without_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what transformers may not know, or warns of: a plan to split says nothing of rotation."""
    return {
        name: value
        for name, value in config.items()
        if name not in ("model_type", "rope_scaling", "rope_parameters", "auto_map", "quantization_config")
    }
