"""A model's rotary geometry out of its config.json, whatever shape that has.

Knows config shapes. Does not know schemes' formulas or transformers' classes.
"""

import math
from collections.abc import Mapping
from typing import Any

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.schemes import SCHEMES

# One theta for the local layers and one for the global layers, as Gemma 3 and ModernBERT wrote it before version 5.
PER_LAYER_THETAS = ("rope_local_base_freq", "local_rope_theta", "global_rope_theta")
NOT_OPTIONS = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
)


def read_geometry(config: Mapping[str, Any]) -> RopeGeometry:
    """Read the geometry from the content of a config.json.

    Understands version 5 (`rope_parameters`) and version 4 (`rope_scaling`, with `rope_theta` beside it). As in
    transformers, a `rope_scaling` that says something wins over `rope_parameters`.

    A block with scaling and an explicit `original_max_position_embeddings` covers whichever is longer:
    `max_position_embeddings`, which mostly includes the factor already (DeepSeek-V3, gpt-oss), or factor × original
    (Qwen3 says 40,960 beside an original 32,768 and factor 4). The factor is never applied to
    `max_position_embeddings` there. Without an explicit original, `max_position_embeddings` is the original, as in the
    formulas of transformers and its advice not to change that field when adding a scaling block.

    Raises:
        UnsupportedModelError: something is missing, contradictory or not supported; the message names it.
    """
    block = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(block, Mapping):
        raise UnsupportedModelError(f"rope_scaling or rope_parameters must be an object, it is {block!r}")
    _refuse_per_layer(config, block)
    scheme = _scheme(block)
    original, native, factor = _lengths(config, block, scheme)
    options = {name: value for name, value in block.items() if name not in NOT_OPTIONS}
    if scheme == "dynamic":
        options["factor"] = _number("factor", _first("factor", block), at_least=1.0)
    rotary_dim = _rotary_dim(config, block)
    if scheme == "longrope":
        options = _longrope_options(block, rotary_dim)
    return RopeGeometry(
        rotary_dim=rotary_dim,
        theta=_theta(config, block),
        original_length=original,
        native_length=native,
        scheme=scheme,
        factor=factor,
        parameters=options,
    )


def _refuse_per_layer(config: Mapping[str, Any], block: Mapping[str, Any]) -> None:
    nested = [name for name, value in block.items() if isinstance(value, Mapping)]
    nested += [name for name in PER_LAYER_THETAS if config.get(name) is not None]
    if nested:
        raise UnsupportedModelError(f"rope parameters per layer type are not supported: {', '.join(nested)}")


def _scheme(block: Mapping[str, Any]) -> str:
    scheme = block.get("rope_type") or block.get("type") or "default"
    if scheme == "su" or (scheme == "yarn" and block.get("long_factor") is not None):
        return "longrope"
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise UnsupportedModelError(f"rope scheme {scheme!r} is not supported; known are {', '.join(sorted(SCHEMES))}")
    return scheme


def _lengths(config: Mapping[str, Any], block: Mapping[str, Any], scheme: str) -> tuple[int, int, float]:
    """Original length, native length and factor."""
    name = "max_position_embeddings"
    longest = int(_number(name, _first(name, config), at_least=1))
    # Dynamic NTK leaves everything up to `max_position_embeddings` unscaled: its factor only shapes what follows.
    if scheme in ("default", "dynamic"):
        return longest, longest, 1.0
    name = "original_max_position_embeddings"
    explicit_original = _first(name, config, block)
    shortest = 2 if scheme == "longrope" else 1  # LongRoPE divides by ln L
    original = longest if explicit_original is None else int(_number(name, explicit_original, at_least=shortest))
    factor = _first("factor", block)
    if factor is None:
        if explicit_original is None:
            raise UnsupportedModelError(f"rope scheme {scheme!r} needs a factor or {name}; the config has neither")
        factor = longest / original
    factor = _number("factor", factor, at_least=1.0)
    covered = max(longest, math.floor(factor * original))
    if scheme == "longrope":  # two plans: the short table up to the original length, the long one up to all of it
        return original, original, covered / original
    return original, covered, factor


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


def _theta(config: Mapping[str, Any], block: Mapping[str, Any]) -> float:
    theta = _first("rope_theta", block, config)
    if theta is None:
        theta = config.get("rotary_emb_base")  # GPT-NeoX
    theta = _number("rope_theta", theta, at_least=1.0)
    if theta == 1.0:
        raise UnsupportedModelError("rope_theta must be above 1: at 1 all pairs turn alike")
    return theta


def _rotary_dim(config: Mapping[str, Any], block: Mapping[str, Any]) -> int:
    rotary_dim = _first("rotary_dim", config)
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
    share = _first("partial_rotary_factor", block, config)
    if share is None:
        share = config.get("rotary_pct")
    if share is None:
        return 1.0
    share = _number("partial_rotary_factor", share, at_least=0.0)
    if share > 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor must be at most 1, it is {share:g}")
    return share


def _first(name: str, *places: Mapping[str, Any]) -> Any:
    """The first value of `name` that is not null; None where there is none."""
    return next((place[name] for place in places if place.get(name) is not None), None)


def _number(name: str, value: Any, *, at_least: float) -> float:
    if value is None:
        raise UnsupportedModelError(f"the config has no {name}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedModelError(f"{name} must be a number, it is {value!r}")
    if value < at_least:
        raise UnsupportedModelError(f"{name} must be at least {at_least:g}, it is {value:g}")
    return float(value)
