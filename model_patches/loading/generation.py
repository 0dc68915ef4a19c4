"""What a model's own files say about generating: where to stop, and how to sample unless the request says.

Knows generation_config.json. Does not know requests or the sampler.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_patches.errors import DamagedModelError
from model_patches.loading.checkpoint import read_json_object

IGNORED: Mapping[str, float] = {
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Sampling keys that have no effect here, each with the value that has none anyway."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults for requests that leave a field out.

    Attributes:
        end_token_ids: generating any of these ends the answer. Empty where neither model nor tokenizer names one.
        temperature: 0.0 where the model asks for greedy decoding; None, as below, where it says nothing.
        top_k: 0 means no limit.
        top_p: in (0, 1].
        min_p: in [0, 1].
        repetition_penalty: 1 means none.
    """

    end_token_ids: frozenset[int]
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_defaults(
    folder: Path, config: Mapping[str, Any], tokenizer_end_token_id: int | None
) -> GenerationDefaults:
    """Read generation_config.json, if there is one.

    End tokens come from the first of generation_config.json, config.json and the tokenizer that names any. Sampling
    keys count wherever they are present, as in vLLM, unless the file says `do_sample: false`: that asks for greedy. The
    repetition penalty counts either way.

    Raises:
        DamagedModelError: a value of the wrong type.
    """
    path = folder / "generation_config.json"
    asked = read_json_object(path) if path.is_file() else {}
    ends = _token_ids(asked.get("eos_token_id"), path)
    ends = ends or _token_ids(config.get("eos_token_id"), folder / "config.json")
    ends = ends or _token_ids(tokenizer_end_token_id, folder)
    if ignored := sorted(key for key, neutral in IGNORED.items() if asked.get(key) not in (None, neutral)):
        logger.warning("%s asks for %s, which this server does not have", path, ", ".join(ignored))
    repetition_penalty = _number(asked, "repetition_penalty", path, 0.01, 100)
    if asked.get("do_sample") is False:
        return GenerationDefaults(ends, temperature=0.0, repetition_penalty=repetition_penalty)
    top_k = _number(asked, "top_k", path, -1, math.inf)
    return GenerationDefaults(
        ends,
        temperature=_number(asked, "temperature", path, 0, math.inf),
        top_k=None if top_k is None else max(0, int(top_k)),  # some write -1 for no limit
        top_p=_number(asked, "top_p", path, 0, 1),
        min_p=_number(asked, "min_p", path, 0, 1),
        repetition_penalty=repetition_penalty,
    )


def _token_ids(value: Any, source: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(number, int) and number >= 0 for number in ids):
        raise DamagedModelError(f"{source}: eos_token_id should be a token id or a list of them, not {value!r}")
    return frozenset(ids)


def _number(values: Mapping[str, Any], key: str, source: Path, least: float, most: float) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DamagedModelError(f"{source}: {key} should be a number, not {value!r}")
    if not least <= value <= most:
        raise DamagedModelError(f"{source}: {key} should be from {least:g} to {most:g}, not {value!r}")
    return float(value)
