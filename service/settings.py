"""Every setting of the server, its default and its limits.

A setting comes from the command line (`--max-running 8`), the environment (`ROPEWALK_MAX_RUNNING=8`) or a TOML or YAML
file (`max_running = 8`), in this order of precedence; an empty variable counts as not set. Knows nothing of what the
settings do.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    PlainValidator,
    SecretStr,
    TypeAdapter,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from service.config_files import read_named_values
from service.environment import PREFIX
from service.logs import LogFormat
from service.scaling.options import LONGEST, Ladder, NativeRope, Wishes
from service.scaling.wish import Growth, PrefixReuse

Quantization = Literal["int8", "int4"]
Dtype = Literal["auto", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32"]
CacheDtype = Literal[Dtype, "int8", "fp8", "float8_e4m3fn"]
ROPE_OPTIONS = {
    "scheme": "rope_scheme",
    "ladder": "rope_ladder",
    "max_length": "max_model_len",
    "native_length": "native_length",
    "native_rope": "native_rope",
    "reserve": "rope_reserve",
    "growth": "growth",
    "growth_refresh_tokens": "growth_refresh_tokens",
    "prefix_reuse": "prefix_reuse",
    "requests_may_choose": "rope_requests_may_choose",
}
"""Options of a policy file and the settings that win over them."""


def _memory(value: Any) -> int | float:
    """Bytes as an int (2GiB, 1000), a share as a float above 0 and at most 1 (0.5, 50%)."""
    text = str(value).strip()
    amount: int | float = 0
    with suppress(ValueError):
        if text.endswith("%"):
            amount = float(text[:-1]) / 100
        elif re.fullmatch(r"\d*\.\d*", text):
            amount = float(text)
        else:
            amount = int(TypeAdapter(ByteSize).validate_python(text))
    if not amount > 0 or (isinstance(amount, float) and amount > 1):
        raise ValueError("must be bytes (2GiB), or a share of the free memory above 0 and at most 1 (0.5 or 50%)")
    return amount


def _listed_origins(value: Any) -> Any:
    """Origins out of "https://a.example, https://b.example" or a list."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _origin(value: str) -> str:
    if not re.fullmatch(r"\*|https?://[^/\s]+", value):
        raise ValueError("must be an origin without a path (https://a.example), or *")
    return value


Origin = Annotated[str, AfterValidator(_origin)]
"""Where a page comes from, as browsers write it: without a path, not even a closing slash."""


class Settings(BaseSettings):
    """The settings of `ropewalk serve`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )

    model: str | None = Field(None, description="model folder, GGUF file or hub name; none: the embedded default")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    trust_remote_code: bool = Field(False, description="run Python code that comes with a model")
    served_model_name: str | None = Field(None, description="the model's name in the API; default: from the model")
    chat_template: Path | None = Field(
        None, description="file with a chat template (Jinja), instead of the model's own"
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 for any free one")
    api_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="bearer key that every route of the API but /health, /ready and /metrics asks for",
    )
    api_key_file: Path | None = Field(
        None, description="file of more such keys, one a line, # begins a comment; read again on SIGHUP"
    )
    metrics_need_key: bool = Field(False, description="/metrics asks for a key too")
    playground: bool = Field(True, description="serve a page to try the model at /; --no-playground: none")
    cors_origins: Annotated[tuple[Origin, ...] | None, NoDecode, BeforeValidator(_listed_origins)] = Field(
        None, description="origins whose pages may call the API (https://a.example,https://b.example), * for any"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=1024,
        description="processes that the model is split over, each with a GPU or a part of the CPU's cores",
    )
    dtype: Dtype = Field(
        "auto", description="weights and activations; auto: the checkpoint's, but never float16 on a CPU"
    )
    quantization: Quantization | None = Field(
        None, description="of linear layers' weights, at start; int4 on CUDA only; needs the extra quant; default: none"
    )
    lora_adapter: Path | None = Field(
        None, description="folder of a LoRA adapter in PEFT's format, merged at start; needs the extra lora"
    )
    cpu_operators: bool = Field(
        True, description="run on the C++ operators where there is a compiler; --no-cpu-operators: on torch's own"
    )
    cuda_graphs: bool = Field(
        True,
        description="replay decode steps on CUDA instead of launching their kernels one by one; "
        "--no-cuda-graphs: launch them",
    )
    deterministic: bool = Field(
        False,
        description="the same request gives the same bits alone and under load, in whatever steps it is computed",
    )
    native_length: int | None = Field(
        None, ge=2, le=LONGEST, description="tokens to treat as the native length; for trying growth on short texts"
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        le=LONGEST,
        description="prompt and generation together, in tokens; "
        "default: as far as the ladder or the config's scaling reaches, else 4 x the native length "
        "(learned and sinusoidal positions: the native length)",
    )
    native_rope: NativeRope | None = Field(
        None,
        description="a scaling block in the model's config is its own plan (config), "
        "or for those only who need it (unscaled); default: decided from the model",
    )
    rope_policy: Path | None = Field(None, description="policy file, .toml or .yaml; what is set apart from it wins")
    rope_scheme: str | None = Field(
        None, description="how longer requests are scaled; default: as the config has it, else yarn"
    )
    rope_ladder: Ladder | None = Field(
        None, description="factors above 1, rising (1.25,1.5,2,4); default: 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, ..."
    )
    rope_reserve: int | None = Field(
        None, ge=1, description="generated tokens that a static plan makes room for, at most; default: 2048"
    )
    rope_requests_may_choose: Wishes | None = Field(
        None,
        description="what requests may ask for: true, false, or some of scheme, mode, factor, growth, prefix_reuse; "
        "default: true",
    )
    growth: Growth | None = Field(None, description="what a request does when it outgrows its plan; default: rerotate")
    growth_refresh_tokens: int | None = Field(
        None, ge=0, description="latest tokens that are computed anew after a re-rotation; default: 0"
    )
    prefix_reuse: PrefixReuse | None = Field(
        None, description="whose cached prefixes a request may use; default: same-plan"
    )
    kv_cache_memory: Annotated[int | float, PlainValidator(_memory)] | None = Field(
        None,
        description="bytes for the cache of a process (2GiB) or a share of the free memory (0.5, 50%); "
        "default: a quarter on a CPU, 85 % on CUDA",
    )
    kv_cache_dtype: CacheDtype = Field(
        "auto",
        description="of cached keys and values; auto: the model's; int8, fp8: half of bf16; fp8 is slow on a CPU",
    )
    prefix_caching: bool = Field(
        True, description="keep what was computed for requests that begin alike; --no-prefix-caching switches it off"
    )
    max_batch_tokens: int = Field(512, ge=1, description="tokens computed in one step, at most")
    decode_step_seconds: float = Field(
        0.25,
        ge=0,
        allow_inf_nan=False,
        description="how long a step that generates for some may take, about: chunks of others' prompts shrink for it; "
        "0: they never do",
    )
    num_speculative_tokens: int = Field(
        0,
        ge=0,
        le=64,
        description="guesses from a request's own text that are computed with its next token, at most; 0 for none",
    )
    max_running: int = Field(64, ge=1, description="requests that run at a time, at most")
    max_queued: int = Field(256, ge=1, description="requests that wait to run, at most")
    max_queued_tokens: int | None = Field(
        None, ge=1, description="prompt tokens that wait to run, beyond which no request is queued; default: no limit"
    )
    max_requests_per_key: int | None = Field(
        None, ge=1, description="requests that one key has under way, at most; default: no limit"
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="tokens of one prompt, at most; default: what the maximum length leaves"
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="tokens that one request may generate for each choice, at most; default: likewise"
    )
    max_choices: int = Field(128, ge=1, description="choices of one request, at most: its prompts times n")
    max_stop_strings: int = Field(16, ge=0, description="stop strings of one request, at most")
    max_stop_length: int = Field(1024, ge=1, description="characters of one stop string, at most")
    request_timeout_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="time that a request may take, queue included; default: no limit"
    )
    max_body_bytes: ByteSize = Field(ByteSize(16 * 2**20), ge=1, description="size of a request body, at most")
    sse_keepalive_seconds: float = Field(15, gt=0, description="silence after which a stream sends a comment")
    client_timeout_seconds: float = Field(
        60,
        ge=0.001,
        le=2_000_000,
        description="how long a client may neither send more of its body nor take any of its answer",
    )
    max_step_failures: int = Field(
        3, ge=1, description="steps that fail one after the other until /health asks for a restart"
    )
    step_timeout_seconds: float = Field(
        300, gt=0, description="how long one step may take until /health asks for a restart"
    )
    shutdown_seconds: int = Field(30, ge=0, description="how long running requests may finish after SIGTERM")
    ray: int | None = Field(
        None,
        ge=1,
        description="replicas behind one address, on Ray Serve; needs the extra ray; default: no Ray",
    )
    ray_min: int | None = Field(
        None, ge=1, description="replicas that stay when there is little to do; default: as many as ray says"
    )
    ray_cpus: int = Field(1, ge=1, description="CPU cores of each replica on Ray")
    otel: bool = Field(
        False,
        description="send traces and metrics where OpenTelemetry's variables (OTEL_...) say; needs the extra otel",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line to log")
    log_format: LogFormat = Field("text", description="how lines are logged; json: one object a line")

    def rope_options(self) -> dict[str, Any]:
        """The options of the positional policy that are set here, under the names that a policy file has for them."""
        values = {option: getattr(self, name) for option, name in ROPE_OPTIONS.items()}
        return {option: value for option, value in values.items() if value is not None}

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as JSON has them; of a secret only that there is one."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @model_validator(mode="after")
    def _every_running_request_gets_a_token(self) -> Self:
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_running ({self.max_running})"
            )
        return self

    @model_validator(mode="after")
    def _what_is_said_of_replicas_fits(self) -> Self:
        for name in ("ray_min", "ray_cpus"):
            if self.ray is None and name in self.model_fields_set:
                raise ValueError(f"{name} ({getattr(self, name)}) needs ray")
        if self.ray is not None and self.ray_min is not None and self.ray_min > self.ray:
            raise ValueError(f"ray_min ({self.ray_min}) must be at most ray ({self.ray})")
        if self.ray is not None and self.tensor_parallel > 1:
            raise ValueError(f"tensor_parallel ({self.tensor_parallel}) does not go with ray: a replica is one process")
        return self

    @model_validator(mode="after")
    def _what_is_said_of_keys_needs_one(self) -> Self:
        for name in ("max_requests_per_key", "metrics_need_key"):
            if getattr(self, name) and self.api_key is None and self.api_key_file is None:
                raise ValueError(f"{name} ({getattr(self, name)}) needs api_key or api_key_file")
        return self


def settings_class(file: Path | None) -> type[Settings]:
    """The settings class that also reads a file.

    Args:
        file: .toml, .yaml or .yml; None for no file.

    Raises:
        StartupError: the file does not exist, is of another kind or cannot be read.
    """
    if file is None:
        return Settings
    content = read_named_values(file, kind="settings file")

    class FileSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del dotenv_settings, file_secret_settings
            return init_settings, env_settings, InitSettingsSource(settings_cls, content)

    return FileSettings
