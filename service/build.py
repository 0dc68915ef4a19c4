"""From settings to a server's parts: the one place where concrete objects are assembled.

Two stages: `inspect` reads config.json, and of the weights only those that plans are made of (clex), so that a model
that cannot be served is refused before a port is opened; `load` reads the weights, which takes longer.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from model_patches.attention import page_size_for
from model_patches.encoding import FixedEncoding, Positions
from model_patches.encoding_config import read_positions
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
from model_patches.recorded import CudaRecorder
from model_patches.tensor_parallel import check_tensor_parallel
from service.cache.groups import group_layers, layers_of_a_page
from service.cache.needs import PageNeeds
from service.cache.pages import PageAllocator
from service.cache.pool import CacheShape, allocate_pool
from service.cache.sizing import choose_num_pages
from service.chat.template import ChatTemplate
from service.distributed.group import smallest
from service.distributed.leader import Leader, LeadingRunner
from service.distributed.place import ALONE, Place
from service.distributed.refusals import check_split
from service.engine.detokenize import NewTextStream, text_streams
from service.engine.engine import Engine
from service.engine.grammar import GrammarFactory
from service.engine.runner import ModelRunner, Runner, warm_up
from service.engine.thread import EngineThread
from service.errors import StartupError
from service.metrics import Metrics
from service.scaling.fixed import AnyPolicy, FixedPolicy
from service.scaling.options import RopePolicy
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
    policy: AnyPolicy
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class LoadedWeights:
    """A model in memory, patched; no cache yet.

    Attributes:
        folder: where it came from.
        loaded: transformers' model, its tokenizer and what its files say about generating.
        model: the patched model.
        shape: of a cache whose pages hold all of its layers.
        bytes: of the weights.
    """

    folder: Path
    loaded: LoadedModel
    model: PatchedModel
    shape: CacheShape
    bytes: int


@dataclass(frozen=True)
class LoadedRunner:
    """A model that is ready to compute.

    Attributes:
        weights: the model.
        shape: of its cache.
        needs: which of its pages each group of layers needs.
        num_pages: of its cache.
        runner: over both.
    """

    weights: LoadedWeights
    shape: CacheShape
    needs: PageNeeds
    num_pages: int
    runner: ModelRunner


@dataclass(frozen=True)
class LoadedServer:
    """What requests need: a running engine and what goes with its model.

    Attributes:
        engine: running and warm.
        tokenizer: of the model.
        new_text_stream: makes detokenisers.
        generation: what the model's files say about stopping and sampling.
        vocabulary: how many token ids the model knows.
        longest_token: see `longest_token_bytes`.
        grammars: compiles what a text must match.
        chat_template: the model's, looked at once.
    """

    engine: EngineThread
    tokenizer: PreTrainedTokenizerFast
    new_text_stream: NewTextStream
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
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, device, config)
    _check_changes(settings, config, device, dtype)
    if isinstance(policy, FixedPolicy):
        logger.info("requests run without any scaling: %s", policy.why)
    elif policy.geometry.is_scaled:
        logger.info(
            "requests run under the model's own plan, as its config has it: %s, factor %g",
            *(policy.geometry.scheme, policy.geometry.factor),
        )
    return InspectedModel(settings.served_model_name or _name(settings.model), policy, device, dtype)


def read_policy(settings: Settings) -> AnyPolicy:
    """The policy of the model that the settings name, which says nothing of where it will run.

    Raises:
        StartupError: see `inspect`.
    """
    return _policy_and_config(settings)[0]


def _policy_and_config(settings: Settings) -> tuple[AnyPolicy, Mapping[str, Any]]:
    options = load_options(settings.rope_policy, settings.rope_options())
    try:
        config = read_config(resolve_config(settings.model, cache_dir=default_cache_dir(), revision=settings.revision))
        check_config(config, trust_remote_code=settings.trust_remote_code)
        positions = read_positions(config, options.native_rope)
        policy = _policy(settings, positions, options)
    except ModelError as error:
        raise StartupError(str(error)) from error
    return policy, config


def _policy(settings: Settings, positions: Positions, options: RopePolicy) -> AnyPolicy:
    if isinstance(positions, FixedEncoding):
        return FixedPolicy(positions, options)
    if positions.scheme == "clex":
        folder = resolve_model(settings.model, cache_dir=default_cache_dir(), revision=settings.revision)
        positions = with_clex_weights(positions, read_clex_weights(folder))
    return Policy(positions, options)


def prepare_files(settings: Settings, inspected: InspectedModel) -> Path:
    """Fetch and convert the model, and compile the operators, where that has not been done yet.

    Returns:
        The model's folder.

    Raises:
        ModelError: it cannot be done.
    """
    folder = resolve_model(
        settings.model,
        cache_dir=default_cache_dir(),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )
    if settings.cpu_operators and inspected.device.type == "cpu":
        operators.load()
    return folder


def load_weights(settings: Settings, inspected: InspectedModel) -> LoadedWeights:
    """Load the weights, or this process's part of them, and patch the model.

    Raises:
        StartupError: the model cannot be loaded.
    """
    device, dtype = inspected.device, inspected.dtype
    try:
        folder = prepare_files(settings, inspected)
        loaded = load_unpatched(settings, inspected, folder)
        num_bytes = weight_bytes(loaded.model)
        # They read unquantised weights, and all of a layer's.
        may_fuse = settings.quantization is None and settings.tensor_parallel == 1
        model = PatchedModel(
            loaded.model,
            inspected.policy.positions,
            fuse=settings.cpu_operators and may_fuse,
            deterministic=settings.deterministic,
        )
    except ModelError as error:
        raise StartupError(str(error)) from error
    if not model.is_fused and multiplies_slowly(device, dtype):
        logger.warning(
            "this processor does not know %s, which torch then multiplies some twenty times as slowly as float32, and "
            "the layers of this model are not fused: dtype float32 is faster and takes twice the memory",
            inspected.dtype,
        )
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


def multiplies_slowly(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies numbers of this type without instructions that are made for them."""
    knows_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cpu" and dtype == torch.bfloat16 and not knows_bfloat16


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
        tensor_parallel=settings.tensor_parallel,
    )


def load_runner(settings: Settings, inspected: InspectedModel, place: Place) -> LoadedRunner:
    """Load the weights, or this process's part of them, and allocate the cache.

    Args:
        settings: of the server.
        inspected: what was made of them.
        place: of this process among those that the model is split over, which do the same at the same time.

    Raises:
        StartupError: it cannot be done; the message says what is missing.
    """
    device, policy = inspected.device, inspected.policy
    weights = load_weights(settings, inspected)
    limits = {"max_batch_tokens": settings.max_batch_tokens, "refresh_tokens": policy.growth_refresh_tokens}
    groups = group_layers(weights.model.windows, weights.shape.page_size, policy.max_length, **limits)
    shape = replace(weights.shape, layers=layers_of_a_page(groups))
    needs = PageNeeds(shape.page_size, [group.window for group in groups], **limits)
    num_pages = choose_num_pages(
        shape, device, settings.kv_cache_memory, policy.max_length, needs=needs, sharers=place.local_size
    )
    if place.size > 1:  # pages have the same numbers everywhere
        num_pages = smallest(num_pages, device)
    pool = allocate_pool(shape, num_pages + records_decoding(settings, device), device)  # a last page that is nobody's
    runner = ModelRunner(weights.model, pool, groups)
    return LoadedRunner(weights, shape, needs, num_pages, runner)


def load(settings: Settings, inspected: InspectedModel, metrics: Metrics, leader: Leader | None = None) -> LoadedServer:
    """Load the weights, allocate the cache, start the engine and run a first step to warm it.

    Args:
        settings: of the server.
        inspected: what was made of them.
        metrics: of the server.
        leader: of the other processes that the model is split over; None where there are none.

    Raises:
        StartupError: it cannot be done; the message says what is missing.
        RankLostError: one of those processes has ended.
    """
    if leader is None:
        computing = load_runner(settings, inspected, ALONE)
        runner: Runner = computing.runner
    else:
        computing, runner = load_with_others(settings, inspected, leader)
    device, policy, num_pages = inspected.device, inspected.policy, computing.num_pages
    weights, shape, needs = computing.weights, computing.shape, computing.needs
    loaded = weights.loaded
    use_chat_template(loaded.tokenizer, settings)
    pages = PageAllocator(num_pages, shape.page_size)
    scheduler = Scheduler(
        pages,
        max_running=settings.max_running,
        decode_step_seconds=settings.decode_step_seconds,
        prefix_caching=settings.prefix_caching,
        max_batch_tokens=settings.max_batch_tokens,
        refresh_tokens=policy.growth_refresh_tokens,
        windows=needs.windows,
    )
    tokenizer: Tokenizer = loaded.tokenizer.backend_tokenizer
    new_text_stream = text_streams(tokenizer)
    engine = EngineThread(
        Engine(
            *(runner, scheduler, new_text_stream, metrics, shape.page_bytes),
            max_draft=settings.num_speculative_tokens,
            max_rows_with_drafts=ROWS_THAT_COST_LITTLE[device.type],
        ),
        metrics,
        max_running=settings.max_running,
        max_queued=settings.max_queued,
    )
    engine.start()
    engine.run(lambda: warm_up(runner, pages, policy, needs.groups))
    if records_decoding(settings, device):
        engine.run(lambda: computing.runner.record_decoding(policy.max_length, settings.max_running, CudaRecorder()))
    metrics.memory.held = {"weights": weights.bytes, "cache": num_pages * shape.page_bytes}
    metrics.cache_requests.set(needs.sequences(num_pages, policy.max_length))
    _log_ready(inspected, shape, num_pages, needs)
    return LoadedServer(
        engine,
        loaded.tokenizer,
        new_text_stream,
        loaded.generation,
        loaded.model.config.vocab_size,
        longest_token_bytes(tokenizer),
        GrammarFactory(tokenizer, loaded.generation.end_token_ids),
        ChatTemplate(loaded.tokenizer),
    )


def records_decoding(settings: Settings, device: torch.device) -> bool:
    """Whether decode steps are to be replayed. Those of a model that is split exchange numbers in the midst of them,
    and the other processes do not record."""
    return settings.cuda_graphs and device.type == "cuda" and settings.tensor_parallel == 1


def load_with_others(settings: Settings, inspected: InspectedModel, leader: Leader) -> tuple[LoadedRunner, Runner]:
    """Load this process's part of a model while the others load theirs.

    Returns:
        That part, and the runner that computes with all of them.
    """
    try:
        prepare_files(settings, inspected)  # so that the others find everything ready
    except ModelError as error:
        raise StartupError(str(error)) from error
    inspected = replace(inspected, device=leader.gather(settings, inspected.device))
    with leader.together():
        computing = load_runner(settings, inspected, leader.place)
    leader.note_loaded()
    return computing, LeadingRunner(computing.runner, leader)


def _check_changes(settings: Settings, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    try:
        if settings.lora_adapter is not None:
            check_adapter(settings.lora_adapter)
        if settings.quantization is not None:
            check_quantization(settings.quantization, device, dtype)
        if settings.tensor_parallel > 1:
            check_split(settings, device)
            check_tensor_parallel(config, settings.tensor_parallel)
    except ModelError as error:
        raise StartupError(str(error)) from error


def use_chat_template(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> None:
    """Give a tokenizer the chat template in the file that the settings name, if they do.

    Raises:
        StartupError: it cannot be read.
    """
    file = settings.chat_template
    if file is None:
        return
    try:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
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


def _log_ready(inspected: InspectedModel, shape: CacheShape, num_pages: int, needs: PageNeeds) -> None:
    policy = inspected.policy
    tokens, requests = needs.tokens(num_pages, policy.max_length), needs.sequences(num_pages, policy.max_length)
    logger.info(
        "%s on %s in %s: native length %d, maximum length %d, ladder %s",
        *(inspected.name, inspected.device, inspected.dtype, policy.native_length, policy.max_length),
        ", ".join(f"{factor:g}" for factor in policy.ladder),
    )
    logger.info(
        "cache: %d pages of %d tokens, %d tokens, %.2f GiB: %.1f requests of the maximum length",
        *(num_pages, shape.page_size, tokens, num_pages * shape.page_bytes / 2**30, requests),
    )
