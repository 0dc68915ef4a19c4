"""From settings to a server's parts: the one place where concrete objects are assembled.

Two stages: `inspect` reads config.json, and of the weights only those that plans are made of (clex), so that a model
that cannot be served is refused before a port is opened; `load` reads the weights, which takes longer.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from model_patches.attention import page_size_for
from model_patches.errors import ModelError
from model_patches.kernels import build as operators
from model_patches.loading.cache import default_cache_dir
from model_patches.loading.checkpoint import check_config, read_config
from model_patches.loading.clex_weights import read_clex_weights, with_clex_weights
from model_patches.loading.embedded import DEFAULT_MODEL_NAME
from model_patches.loading.generation import GenerationDefaults
from model_patches.loading.gguf_parts import model_name_of
from model_patches.loading.load import LoadedModel, load_model
from model_patches.loading.lora import check_adapter
from model_patches.loading.quantize import check_quantization, weight_bytes
from model_patches.loading.source import resolve_config, resolve_model
from model_patches.patch import PatchedModel
from model_patches.rope_config import read_geometry
from service.cache.pages import PageAllocator
from service.cache.pool import CacheShape, allocate_pool
from service.cache.sizing import choose_num_pages
from service.chat.template import ChatTemplate
from service.engine.detokenize import Detokenizer
from service.engine.engine import Engine
from service.engine.grammar import GrammarFactory
from service.engine.runner import ModelRunner, warm_up
from service.engine.thread import EngineThread
from service.errors import StartupError
from service.metrics import Metrics
from service.scaling.policy import Policy
from service.scaling.policy_file import load_options
from service.scheduler.scheduler import Scheduler
from service.settings import Settings

logger = logging.getLogger(__name__)

DTYPES = {
    **{"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32},
    **{"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32},
}
ROWS_THAT_COST_LITTLE = {"cpu": 16, "cuda": 64}
"""Tokens in a step beside which reading the weights is what takes time."""
CACHE_DTYPES = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "float8_e4m3fn": torch.float8_e4m3fn}


@dataclass(frozen=True)
class InspectedModel:
    """A model whose config has been read and accepted; no weights yet.

    Attributes:
        name: the model's name in the API.
        policy: chooses plans for it.
        device: where it will run.
        dtype: of its weights and activations.
    """

    name: str
    policy: Policy
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class LoadedWeights:
    """A model in memory, patched; no cache yet.

    Attributes:
        folder: where it came from.
        loaded: transformers' model, its tokenizer and what its files say about generating.
        model: the patched model.
        shape: of a cache for it.
        bytes: of the weights.
    """

    folder: Path
    loaded: LoadedModel
    model: PatchedModel
    shape: CacheShape
    bytes: int


@dataclass(frozen=True)
class LoadedServer:
    """What requests need: a running engine and what goes with its model.

    Attributes:
        engine: running and warm.
        tokenizer: of the model.
        generation: what the model's files say about stopping and sampling.
        vocabulary: how many token ids the model knows.
        longest_token: see `longest_token_bytes`.
        grammars: compiles what a text must match.
        chat_template: the model's, looked at once.
    """

    engine: EngineThread
    tokenizer: PreTrainedTokenizerFast
    generation: GenerationDefaults
    vocabulary: int
    longest_token: int | None
    grammars: GrammarFactory
    chat_template: ChatTemplate


def inspect(settings: Settings) -> InspectedModel:
    """Find the model and read its config; of a clex model also that scheme's weights, which takes all of its files.

    Raises:
        StartupError: it cannot be found or served, or a setting does not go with it.
    """
    policy, config = _policy_and_config(settings)
    geometry = policy.geometry
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, device, config)
    _check_changes(settings, device, dtype)
    if geometry.is_scaled:
        logger.info(
            "requests run under the model's own plan, as its config has it: %s, factor %g",
            *(geometry.scheme, geometry.factor),
        )
    return InspectedModel(settings.served_model_name or _name(settings.model), policy, device, dtype)


def read_policy(settings: Settings) -> Policy:
    """The policy of the model that the settings name, which says nothing of where it will run.

    Raises:
        StartupError: see `inspect`.
    """
    return _policy_and_config(settings)[0]


def _policy_and_config(settings: Settings) -> tuple[Policy, Mapping[str, Any]]:
    options = load_options(settings.rope_policy, settings.rope_options())
    try:
        config = read_config(resolve_config(settings.model, cache_dir=default_cache_dir(), revision=settings.revision))
        check_config(config, trust_remote_code=settings.trust_remote_code)
        geometry = read_geometry(config, options.native_rope)
        if geometry.scheme == "clex":
            folder = resolve_model(settings.model, cache_dir=default_cache_dir(), revision=settings.revision)
            geometry = with_clex_weights(geometry, read_clex_weights(folder))
        return Policy(geometry, options), config
    except ModelError as error:
        raise StartupError(str(error)) from error


def load_weights(settings: Settings, inspected: InspectedModel) -> LoadedWeights:
    """Load the weights and patch the model.

    Raises:
        StartupError: the model cannot be loaded.
    """
    device, dtype = inspected.device, inspected.dtype
    try:
        folder = resolve_model(
            settings.model,
            cache_dir=default_cache_dir(),
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
        )
        loaded = load_unpatched(settings, inspected, folder)
        num_bytes = weight_bytes(loaded.model)
        if settings.cpu_operators and device.type == "cpu":
            operators.load()
        model = PatchedModel(
            loaded.model,
            inspected.policy.geometry,
            fuse=settings.cpu_operators and settings.quantization is None,  # they read unquantised weights
            deterministic=settings.deterministic,
        )
    except ModelError as error:
        raise StartupError(str(error)) from error
    kv_dtype = _kv_dtype(settings.kv_cache_dtype, dtype)
    shape = CacheShape(
        layers=model.layers,
        page_size=page_size_for(device, dtype, kv_dtype, model.key_dim, model.value_dim),
        kv_heads=model.kv_heads,
        key_dim=model.key_dim,
        value_dim=model.value_dim,
        dtype=kv_dtype,
    )
    return LoadedWeights(folder, loaded, model, shape, num_bytes)


def load_unpatched(settings: Settings, inspected: InspectedModel, folder: Path) -> LoadedModel:
    """The model as transformers has it, with the adapter and the quantisation that the settings ask for.

    Args:
        settings: of the server.
        inspected: what was made of them.
        folder: of the model.

    Raises:
        ModelError: it cannot be loaded.
    """
    return load_model(
        folder,
        dtype=inspected.dtype,
        device=inspected.device,
        trust_remote_code=settings.trust_remote_code,
        adapter=settings.lora_adapter,
        quantization=settings.quantization,
    )


def load(settings: Settings, inspected: InspectedModel, metrics: Metrics) -> LoadedServer:
    """Load the weights, allocate the cache, start the engine and run a first step to warm it.

    Raises:
        StartupError: it cannot be done; the message says what is missing.
    """
    device, policy = inspected.device, inspected.policy
    weights = load_weights(settings, inspected)
    loaded, shape = weights.loaded, weights.shape
    if settings.chat_template is not None:
        loaded.tokenizer.chat_template = read_chat_template(settings.chat_template)
    num_pages = choose_num_pages(shape, device, settings.kv_cache_memory, policy.max_length)
    pages = PageAllocator(num_pages, shape.page_size)
    scheduler = Scheduler(
        pages,
        max_running=settings.max_running,
        max_batch_tokens=settings.max_batch_tokens,
        prefix_caching=settings.prefix_caching,
        refresh_tokens=policy.growth_refresh_tokens,
    )
    runner = ModelRunner(weights.model, allocate_pool(shape, num_pages, device))
    tokenizer: Tokenizer = loaded.tokenizer.backend_tokenizer
    engine = EngineThread(
        Engine(
            *(runner, scheduler, partial(Detokenizer, tokenizer), metrics, shape.page_bytes),
            max_draft=settings.num_speculative_tokens,
            max_rows_with_drafts=ROWS_THAT_COST_LITTLE[device.type],
        ),
        metrics,
        max_running=settings.max_running,
        max_queued=settings.max_queued,
    )
    engine.start()
    engine.run(lambda: warm_up(runner, pages, policy))
    metrics.memory.held = {"weights": weights.bytes, "cache": num_pages * shape.page_bytes}
    metrics.cache_requests.set(num_pages * shape.page_size / policy.max_length)
    _log_ready(inspected, shape, num_pages)
    return LoadedServer(
        engine,
        loaded.tokenizer,
        loaded.generation,
        loaded.model.config.vocab_size,
        longest_token_bytes(tokenizer),
        GrammarFactory(tokenizer, loaded.generation.end_token_ids),
        ChatTemplate(loaded.tokenizer),
    )


def _check_changes(settings: Settings, device: torch.device, dtype: torch.dtype) -> None:
    try:
        if settings.lora_adapter is not None:
            check_adapter(settings.lora_adapter)
        if settings.quantization is not None:
            check_quantization(settings.quantization, device, dtype)
    except ModelError as error:
        raise StartupError(str(error)) from error


def read_chat_template(file: Path) -> str:
    """The chat template in a file.

    Raises:
        StartupError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(f"the chat template {file} cannot be read: {error}") from error


def longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Bytes of text that one token stands for at most.

    Returns:
        None where the tokenizer is not byte-level, rewrites text first, or drops bytes that it has no token for: there
        a text's bytes say nothing of how few tokens it can have.
    """
    vocabulary = tokenizer.get_vocab()
    complete = vocabulary.keys() >= set(ByteLevel.alphabet())
    if not complete or tokenizer.normalizer is not None or not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    # In such a vocabulary one character stands for one byte, and takes one or two: never too few.
    return max(len(token.encode()) for token in vocabulary)


def _name(model: str | None) -> str:
    if model is None:
        return DEFAULT_MODEL_NAME
    path = Path(model).expanduser()
    if path.is_file():
        return model_name_of(path)
    return path.resolve().name if path.is_dir() else model


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("device is cuda, but torch sees no CUDA device")
    return torch.device(name)


def _dtype(name: str, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:
    if name == "auto":
        asked = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        name = "bfloat16" if asked == "float16" and device.type == "cpu" else asked
    if name not in DTYPES:
        raise StartupError(f"dtype {name!r} in the model's config is not supported: use bfloat16, float16 or float32")
    if DTYPES[name] == torch.float16 and device.type == "cpu":
        raise StartupError("dtype float16 has no fast path on a CPU: use bfloat16 or float32")
    return DTYPES[name]


def _kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are kept as: the model's own type for auto."""
    return CACHE_DTYPES.get(name, dtype)


def _log_ready(inspected: InspectedModel, shape: CacheShape, num_pages: int) -> None:
    policy = inspected.policy
    tokens = num_pages * shape.page_size
    logger.info(
        "%s on %s in %s: native length %d, maximum length %d, ladder %s",
        *(inspected.name, inspected.device, inspected.dtype, policy.native_length, policy.max_length),
        ", ".join(f"{factor:g}" for factor in policy.ladder),
    )
    logger.info(
        "cache: %d pages of %d tokens, %d tokens, %.2f GiB: %.1f requests of the maximum length",
        *(num_pages, shape.page_size, tokens, num_pages * shape.page_bytes / 2**30, tokens / policy.max_length),
    )
