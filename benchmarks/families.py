"""Two Markdown tables: the supported architectures, and what is served of published models.

    python -m benchmarks.families > benchmarks/families.md

The first says of each architecture what the tests run of it (`tests/reference/supported.py`), the second reads the
configs that the tests hold (`tests/model_patches/families.py`) as a server would. Needs no weights.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model_patches.encoding import FixedEncoding, Positions
from model_patches.encoding_config import read_positions
from model_patches.geometry import RopeGeometry
from model_patches.loading.checkpoint import SUPPORTED_ARCHITECTURES
from model_patches.patch import PatchedModel
from model_patches.rope_config import read_geometry
from model_patches.schemes import SCHEMES
from service.scaling.policy import Policy
from tests.model_patches.families import FAMILIES, Family, with_stand_in_weights
from tests.reference.growing import tiny
from tests.reference.supported import FAMILIES as UNSCALED
from tests.reference.supported import configs

COLUMNS = (
    *("model", "scheme in config.json", "native length", "native plan", "maximum length", "ladder"),
    *("rotary dimension of head", "layout", "base of windowed layers"),
)
NAMES = {"learned": "learned", "sinusoidal": "sinusoidal", "alibi": "ALiBi"}
FEATURES = ("architecture", "rotary layout", "rotated of a head", "attention", "re-rotated keys", "schemes refused")


def main() -> None:
    """Print both tables."""
    print(document(), end="")


def document() -> str:
    """Both tables under their headings."""
    return f"""# Supported architectures

By `python -m benchmarks.families`, from the models that the tests run. A model whose config scales it runs under its
own scheme only, LongRoPE (Phi3) and CLEX (Llama) among them. Where positions are no rotations, the layout says what
they are instead, and no scheme can be asked for.

{supported()}

# Published models as they are served where nothing is configured

Lengths in tokens; the factors of a ladder are in native lengths, except where the only rung is the model's own plan.

{published()}
"""


def supported() -> str:
    """The table of architectures, in the order in which they are listed."""
    return _table(FEATURES, (_features(architecture) for architecture in SUPPORTED_ARCHITECTURES))


def published() -> str:
    """The table of models."""
    return _table(COLUMNS, (_cells(family) for family in FAMILIES))


def _features(architecture: str) -> Iterator[str]:
    variants = [config for config in configs() if _architecture(config) == architecture]
    models = [PatchedModel(tiny(config), _positions(config), fuse=False) for config in variants]
    fixed = [model.positions for model in models if isinstance(model.positions, FixedEncoding)]
    models = [model for model in models if isinstance(model.positions, RopeGeometry)]
    yield architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    kinds = _listed(NAMES[encoding.kind] for encoding in fixed)
    yield " or ".join(filter(None, (_listed(model.geometry.layout for model in models), kinds)))
    if not models:
        yield from ("nothing", "", "none", "all")
        return
    yield " or ".join(sorted({_share(model) for model in models}, reverse=True))
    yield _listed(chain.from_iterable(map(_attention, models)))
    yield _listed(_moved(model) for model in models)
    schemes = {scheme for model in models for scheme in Policy(model.geometry).schemes}
    is_scalable = any(config in UNSCALED.values() for config in variants)
    yield _listed(sorted(SCHEMES.keys() - schemes)) if is_scalable else f"all but {_listed(schemes)}"


def _architecture(config: Any) -> str:
    name: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    return name


def _positions(config: Any) -> Positions:
    return read_positions(config.to_dict(), "config")


def _share(model: PatchedModel) -> str:
    return "whole" if model.geometry.rotary_dim == model.key_dim else "part"


def _attention(model: PatchedModel) -> Iterator[str]:
    """What a model's attention has beyond a softmax over all keys."""
    config = model.model.config
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    if getattr(config, "sliding_window", None) and "sliding_attention" in types:
        yield "windows in some layers" if len(set(types)) > 1 else "windows"
    if getattr(config, "attn_logit_softcapping", None):
        yield "soft caps"
    if any(name.endswith("sinks") for name, _ in model.model.named_parameters()):
        yield "sinks"
    if getattr(config, "kv_lora_rank", None):
        yield "latent"


def _moved(model: PatchedModel) -> str:
    if not model.local_layers:
        return "all"
    return "of rotated layers" if model.geometry.local is None else "of layers without a window"


def _cells(family: Family) -> Iterator[str]:
    geometry = with_stand_in_weights(read_geometry(family.config))
    policy = Policy(geometry)
    yield family.name
    yield _plan(read_geometry(family.config, "config")) + (", a ceiling" if geometry.configured_scheme else "")
    yield f"{policy.native_length:,}"
    yield _plan(geometry)
    yield f"{policy.max_length:,}"
    yield ", ".join(f"{factor:g}" for factor in policy.ladder)
    yield f"{geometry.rotary_dim} of {family.expected.head_dim}"
    yield geometry.layout
    yield "" if geometry.local is None else f"{geometry.local.theta:,g}"


def _plan(geometry: RopeGeometry) -> str:
    return "unscaled" if geometry.scheme == "default" else f"{geometry.scheme} {geometry.factor:g}"


def _listed(words: Iterable[str]) -> str:
    """Words in order, each once."""
    return ", ".join(dict.fromkeys(words))


def _table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ("---" for _ in columns), *rows))


if __name__ == "__main__":
    main()
