"""A model's rotary geometry out of its config.json, whatever shape that has.

Knows config shapes. Does not know schemes' formulas or transformers' classes.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import OWN_TABLES, LocalRope, RopeGeometry
from model_patches.rope_blocks import LOCAL_THETAS, RopeBlocks, first_of, rope_blocks, text_part
from model_patches.rope_families import (
    BACKWARDS,
    TRAINED_LONGER,
    TRAINED_WHOLE,
    fixed_theta,
    is_ceiling,
    layout,
    model_type,
    with_defaults,
)
from model_patches.schemes import known_schemes

NativeRope = Literal["config", "unscaled"]

NOT_OPTIONS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        "finetuned",
    }
)
UNSUPPORTED = {
    "mrope": "it rotates by time, height and width, where here a token has one position",
    "proportional": "it leaves some pairs of a head unrotated between those that it rotates",
}


def read_geometry(config: Mapping[str, Any], native_rope: NativeRope | None = None) -> RopeGeometry:
    """Read the geometry from the content of a config.json.

    Understands version 5 (`rope_parameters`, also nested per layer type), version 4 (`rope_scaling`, with `rope_theta`
    beside it) and a `text_config`; see `rope_blocks` and `rope_families`.

    A block with scaling and an explicit `original_max_position_embeddings` covers whichever is longer:
    `max_position_embeddings`, which mostly includes the factor already (DeepSeek-V3, gpt-oss), or factor × original
    (Qwen3 says 40,960 beside an original 32,768 and factor 4). The factor is never applied to
    `max_position_embeddings` there. Without an explicit original, `max_position_embeddings` is the original, as in the
    formulas of transformers and its advice not to change that field when adding a scaling block.

    Args:
        config: the content of config.json.
        native_rope: whether a scaling block is the model's own plan (`config`) or a ceiling for those who need it
            (`unscaled`); None: as the model's family has it, which is `unscaled` for a YaRN block on Qwen's text models
            and `config` for all others. Without such a block it changes nothing.

    Raises:
        UnsupportedModelError: something is missing, contradictory or not supported; the message names it.
    """
    config = with_defaults(text_part(config))
    _refuse_other_positions(config)
    blocks = rope_blocks(config)
    geometry = _geometry(config, blocks)
    if not geometry.is_scaled or native_rope == "config":
        return geometry
    if native_rope is None and not is_ceiling(config, geometry.scheme):
        return geometry
    _refuse_bound_scaling(geometry)
    return geometry.unscaled()


def _geometry(config: Mapping[str, Any], blocks: RopeBlocks) -> RopeGeometry:
    block = blocks.whole
    scheme = _scheme(block)
    original, native, factor = _lengths(config, block, scheme)
    rotary_dim = _rotary_dim(config, block)
    return RopeGeometry(
        rotary_dim=rotary_dim,
        theta=_theta(("global_rope_theta", "rope_theta", "rotary_emb_base"), config, block),
        original_length=original,
        native_length=native,
        scheme=scheme,
        factor=factor,
        parameters=_options(block, scheme, rotary_dim),
        layout=layout(config),
        local=_local(config, blocks),
    )


def _refuse_other_positions(config: Mapping[str, Any]) -> None:
    if config.get("alibi"):
        raise UnsupportedModelError("alibi is true: this model's positions are biases of its attention, not rotations")
    if config.get("log_scale"):  # CLEX's published models
        raise UnsupportedModelError("log_scale is true: queries that grow with ln(length) are not supported")
    if config.get("layer_rope_theta") is not None:
        raise UnsupportedModelError("layer_rope_theta is not supported: one base for each layer")
    if model_type(config) in BACKWARDS:
        raise UnsupportedModelError(
            f"model_type {model_type(config)!r} is not supported: it rotates backwards, so that cached keys could not "
            "be moved from one plan to another"
        )


def _refuse_bound_scaling(geometry: RopeGeometry) -> None:
    if geometry.scheme in OWN_TABLES:
        reason = f"rope scheme {geometry.scheme!r} has tables of its own for every length"
    elif geometry.parameters.get("mscale_all_dim"):
        reason = "mscale_all_dim builds the scaling into the model's softmax scale"
    else:
        return
    raise UnsupportedModelError(f"native_rope 'unscaled' does not go with this model: {reason}")


def _local(config: Mapping[str, Any], blocks: RopeBlocks) -> LocalRope | None:
    if blocks.local is None:
        return None
    if (scheme := _scheme(blocks.local)) != "default":
        names = ", ".join(blocks.local_types)
        raise UnsupportedModelError(f"rope scheme {scheme!r} on layers that see a window ({names}) is not supported")
    theta = _theta((*LOCAL_THETAS, "rope_theta"), config, blocks.local)
    return LocalRope(blocks.local_types, theta, _rotary_dim(config, blocks.local))


def _scheme(block: Mapping[str, Any]) -> str:
    scheme = block.get("rope_type") or block.get("type") or "default"
    if block.get("mrope_section") is not None:
        scheme = "mrope"
    if isinstance(scheme, str) and scheme in UNSUPPORTED:
        raise UnsupportedModelError(f"rope scheme {scheme!r} is not supported: {UNSUPPORTED[scheme]}")
    if scheme == "su" or (scheme == "yarn" and block.get("long_factor") is not None):
        return "longrope"
    if not isinstance(scheme, str) or scheme not in known_schemes():
        known = ", ".join(sorted(known_schemes()))
        raise UnsupportedModelError(f"rope scheme {scheme!r} is not supported; known are {known}")
    return scheme


def _lengths(config: Mapping[str, Any], block: Mapping[str, Any], scheme: str) -> tuple[int, int, float]:
    """Original length, native length and factor."""
    longest = int(_number("max_position_embeddings", config.get("max_position_embeddings"), at_least=1))
    # Dynamic NTK leaves everything up to `max_position_embeddings` unscaled: its factor only shapes what follows.
    if scheme in ("default", "dynamic"):
        if model_type(config) in TRAINED_LONGER and config.get("model_max_length") is not None:
            longest = max(longest, int(_number("model_max_length", config["model_max_length"], at_least=1)))
        return longest, longest, 1.0
    if scheme == "clex":  # all in units of `max_position_embeddings`; the block's factor says nothing
        most = _number("max_factor", block.get("max_factor"), at_least=1.0)
        return longest, longest, float(math.floor(most))  # it stretches by whole numbers
    name = "original_max_position_embeddings"
    explicit_original = first_of((name,), config, block)
    shortest = 2 if scheme == "longrope" else 1  # LongRoPE divides by ln L
    original = longest if explicit_original is None else int(_number(name, explicit_original, at_least=shortest))
    if scheme == "dynamic-yarn":
        return original, original, 1.0
    factor = block.get("factor")
    if factor is None:
        if explicit_original is None:
            raise UnsupportedModelError(f"rope scheme {scheme!r} needs a factor or {name}; the config has neither")
        factor = longest / original
    factor = _number("factor", factor, at_least=1.0)
    if model_type(config) in TRAINED_WHOLE:
        return min(original, longest), longest, factor
    covered = max(longest, math.floor(factor * original))
    if scheme == "longrope":  # two plans: the short table up to the original length, the long one up to all of it
        return original, original, covered / original
    return original, covered, factor


def _options(block: Mapping[str, Any], scheme: str, rotary_dim: int) -> dict[str, Any]:
    if scheme == "longrope":
        return _longrope_options(block, rotary_dim)
    options = {name: value for name, value in block.items() if name not in NOT_OPTIONS}
    if scheme == "dynamic":
        options["factor"] = _number("factor", block.get("factor"), at_least=1.0)
    return options


def _longrope_options(block: Mapping[str, Any], rotary_dim: int) -> dict[str, Any]:
    """Both tables as tuples, and what else the formula takes: only what the block states itself."""
    mscales = [name for name in ("short_mscale", "long_mscale") if block.get(name) is not None]
    if mscales:
        raise UnsupportedModelError(f"rope scheme 'longrope' with {' and '.join(mscales)} is not supported")
    options: dict[str, Any] = {name: _table(name, block, rotary_dim // 2) for name in ("short_factor", "long_factor")}
    for name, at_least in (("factor", 1.0), ("attention_factor", 0.0)):
        if block.get(name) is not None:
            options[name] = _number(name, block[name], at_least=at_least)
    return options


def _table(name: str, block: Mapping[str, Any], pairs: int) -> tuple[float, ...]:
    table = block.get(name)
    if not isinstance(table, list | tuple) or len(table) != pairs:
        what = f"{len(table)} values" if isinstance(table, list | tuple) else repr(table)
        raise UnsupportedModelError(
            f"rope scheme 'longrope' needs {name} with a number for each of {pairs} pairs, it is {what}"
        )
    divisors = tuple(_number(f"a value of {name}", value, at_least=0.0) for value in table)
    if 0.0 in divisors:
        raise UnsupportedModelError(f"{name} must hold numbers above 0: pairs are slowed by them")
    return divisors


def _theta(names: tuple[str, ...], config: Mapping[str, Any], block: Mapping[str, Any]) -> float:
    theta = first_of(("rope_theta",), block)
    if theta is None:
        theta = first_of(names, config)
    theta = _number("rope_theta", fixed_theta(config) if theta is None else theta, at_least=1.0)
    if theta == 1.0:
        raise UnsupportedModelError("rope_theta must be above 1: at 1 all pairs turn alike")
    return theta


def _rotary_dim(config: Mapping[str, Any], block: Mapping[str, Any]) -> int:
    rotary_dim = config.get("rotary_dim")
    if rotary_dim is None:
        rotary_dim = config.get("qk_rope_head_dim")  # latent attention (DeepSeek) rotates a part of its own
    if rotary_dim is None:
        rotary_dim = int(_head_dim(config) * _rotated_share(config, block))
    rotary_dim = int(_number("rotary dimension", rotary_dim, at_least=1))
    if rotary_dim % 2 or rotary_dim < 4:
        raise UnsupportedModelError(f"the rotary dimension must be even and at least 4, it is {rotary_dim}")
    return rotary_dim


def _head_dim(config: Mapping[str, Any]) -> int:
    head_dim = config.get("head_dim")
    if head_dim is not None:
        return int(_number("head_dim", head_dim, at_least=1))
    hidden_size = _number("hidden_size", config.get("hidden_size"), at_least=1)
    heads = _number("num_attention_heads", config.get("num_attention_heads"), at_least=1)
    return int(hidden_size // heads)


def _rotated_share(config: Mapping[str, Any], block: Mapping[str, Any]) -> float:
    share = first_of(("partial_rotary_factor",), block, config)
    if share is None:
        share = config.get("rotary_pct")
    if share is None:
        return 1.0
    share = _number("partial_rotary_factor", share, at_least=0.0)
    if share > 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor must be at most 1, it is {share:g}")
    return share


def _number(name: str, value: Any, *, at_least: float) -> float:
    if value is None:
        raise UnsupportedModelError(f"the config has no {name}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedModelError(f"{name} must be a number, it is {value!r}")
    if value < at_least:
        raise UnsupportedModelError(f"{name} must be at least {at_least:g}, it is {value:g}")
    return float(value)
