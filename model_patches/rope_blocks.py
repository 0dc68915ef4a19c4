"""Which part of a config.json holds the rotary parameters, and of which layers.

Knows where versions and families write them. Does not know what the parameters mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_patches.errors import UnsupportedModelError
from model_patches.rope_families import LOCAL_SCALED, LOCAL_UNSCALED, model_type

ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "global_rope_theta")
# The base of windowed layers beside that of all others, as it was written before version 5.
LOCAL_THETAS = ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta")
WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class RopeBlocks:
    """What a config says of its layers, each part a block as in `rope_parameters`.

    Attributes:
        whole: of the layers that see everything.
        local: of those that see a window only; None where all layers are alike.
        local_types: the names of the latter in `layer_types`.
    """

    whole: Mapping[str, Any]
    local: Mapping[str, Any] | None = None
    local_types: tuple[str, ...] = ()


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: `text_config`, where only that has rotary parameters."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or any(config.get(name) is not None for name in ROPE_FIELDS):
        return config
    return {"model_type": config.get("model_type"), **text}


def rope_blocks(config: Mapping[str, Any]) -> RopeBlocks:
    """Sort the blocks of a config by layers.

    As in transformers, a `rope_scaling` that says something wins over `rope_parameters`; where only the latter is
    nested per layer type, the former is of the layers that see everything.

    Raises:
        UnsupportedModelError: the layers that scaling would be for cannot be told.
    """
    scaling, parameters = _block("rope_scaling", config), _block("rope_parameters", config)
    if _is_nested(scaling):
        return _by_layer_type(scaling)
    if _is_nested(parameters):
        blocks = _by_layer_type(parameters)
        local = _local(config, scaling, blocks.local or {}) if blocks.local_types else None
        return RopeBlocks({**blocks.whole, **scaling}, local, blocks.local_types)
    block = scaling or parameters
    theta = first_of(LOCAL_THETAS, config)
    if theta is None and model_type(config) in LOCAL_UNSCALED:
        theta = first_of(("rope_theta",), block, config)
    if theta is None:
        return RopeBlocks(block)
    shared = {name: block[name] for name in ("partial_rotary_factor",) if name in block}
    return RopeBlocks(block, _local(config, scaling, {**shared, "rope_theta": theta}), WINDOWED[:1])


def first_of(names: tuple[str, ...], *places: Mapping[str, Any]) -> Any:
    """The first value under any of these names that is not null; None where there is none."""
    return next((place[name] for place in places for name in names if place.get(name) is not None), None)


def _block(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    block = config.get(name) or {}
    if not isinstance(block, Mapping):
        raise UnsupportedModelError(f"{name} must be an object, it is {block!r}")
    return block


def _is_nested(block: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in block.values())


def _local(config: Mapping[str, Any], scaling: Mapping[str, Any], local: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**local, **scaling} if model_type(config) in LOCAL_SCALED else local


def _by_layer_type(nested: Mapping[str, Any]) -> RopeBlocks:
    """A null stands for layers that are not rotated."""
    stray = [name for name, block in nested.items() if not isinstance(block, Mapping | None)]
    if stray:
        raise UnsupportedModelError(f"rope parameters per layer type have {', '.join(stray)} beside them")
    rotated = {name: block for name, block in nested.items() if block is not None}
    whole = {name: block for name, block in rotated.items() if name not in WINDOWED}
    windowed = {name: block for name, block in rotated.items() if name in WINDOWED}
    if not whole:
        raise UnsupportedModelError(
            f"only layers that see a window are rotated ({', '.join(windowed)}): there is nothing to scale"
        )
    return RopeBlocks(_common(whole), _common(windowed) if windowed else None, tuple(windowed))


def _common(blocks: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    first, *others = blocks.values()
    if any(other != first for other in others):
        raise UnsupportedModelError(
            f"rope parameters per layer type are supported where layers that see everything have one kind and layers "
            f"that see a window have another; here they differ between {', '.join(blocks)}"
        )
    return first
