"""The parts of a server that an evaluation runs on, without its thread and its HTTP side.

Knows how they are put together. Does not know what is measured on them.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from model_patches.loading.lora import CONFIG
from service import build
from service.build import InspectedModel
from service.cache.pages import PageAllocator
from service.cache.pool import allocate_pool
from service.cache.sizing import choose_num_pages
from service.engine.runner import ModelRunner
from service.errors import StartupError
from service.evaluation.driver import Driver
from service.evaluation.unrotated import UnrotatedModel
from service.scaling.policy import Policy
from service.settings import Settings


@dataclass(frozen=True)
class Assembly:
    """
    Attributes:
        driver: of the serving engine.
        tokenizer: of the model.
        reference: the same weights, loaded once more, on the unrotated reference path.
        identity: what the engine's numbers depend on, beside text and plan: to be compared, as JSON.
    """

    driver: Driver
    tokenizer: Tokenizer
    reference: Callable[[], UnrotatedModel]
    identity: dict[str, Any]


def assemble(settings: Settings, inspected: InspectedModel, longest: int) -> Assembly:
    """Load the weights and make an engine whose cache holds at least one sequence of so many tokens.

    Raises:
        StartupError: the model cannot be loaded, or there is too little memory.
    """
    if settings.tensor_parallel > 1:
        raise StartupError(f"tensor_parallel ({settings.tensor_parallel}): evaluation runs in one process")
    device, dtype, policy = inspected.device, inspected.dtype, inspected.policy
    weights = build.load_weights(settings, inspected)
    loaded, shape = weights.loaded, weights.shape
    room = choose_num_pages(shape, device, settings.kv_cache_memory, longest)
    num_pages = min(room, 2 * -(-longest // shape.page_size))  # one sequence, and prefixes that others share
    tokenizer: Tokenizer = loaded.tokenizer.backend_tokenizer
    driver = Driver(
        ModelRunner(weights.model, allocate_pool(shape, num_pages, device)),
        PageAllocator(num_pages, shape.page_size),
        tokenizer,
        end_token_ids=loaded.generation.end_token_ids,
        page_bytes=shape.page_bytes,
        max_batch_tokens=settings.max_batch_tokens,
        refresh_tokens=policy.growth_refresh_tokens,
    )
    identity = {
        "ropewalk": version("ropewalk"),
        "weights": fingerprint(weights.folder),
        "lora_adapter": None if settings.lora_adapter is None else fingerprint(settings.lora_adapter, CONFIG),
        "quantization": settings.quantization,
        "device": device.type,
        "dtype": str(dtype),
        "kv_dtype": str(shape.dtype),
        "max_batch_tokens": settings.max_batch_tokens,
        "refresh_tokens": policy.growth_refresh_tokens,
    }

    def reference() -> UnrotatedModel:
        assert isinstance(policy, Policy)  # measures that need it refuse all others
        again = build.load_unpatched(settings, inspected, weights.folder)
        return UnrotatedModel(again.model, policy.geometry)

    return Assembly(driver, tokenizer, cache(reference), identity)


def fingerprint(folder: Path, config: str = "config.json") -> str:
    """What tells a folder from another, and from itself after a change: its config, and the names, sizes and times of
    its other files."""
    summed = hashlib.sha256((folder / config).read_bytes())
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name != config:
            facts = file.stat()
            summed.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return summed.hexdigest()[:16]
