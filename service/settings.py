"""Every setting of the server, its default and its limits.

A setting comes from the command line (`--max-running 8`), the environment (`ROPEWALK_MAX_RUNNING=8`) or a TOML or YAML
file (`max_running = 8`), in this order of precedence. Knows nothing of what the settings do.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import ByteSize, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from service.errors import StartupError

Dtype = Literal["auto", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32"]


class Settings(BaseSettings):
    """The settings of `ropewalk serve`."""

    model_config = SettingsConfigDict(env_prefix="ROPEWALK_", extra="forbid", frozen=True, protected_namespaces=())

    model: str | None = Field(None, description="model folder, GGUF file or hub name; none: the embedded default")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    trust_remote_code: bool = Field(False, description="run Python code that comes with a model")
    served_model_name: str | None = Field(None, description="the model's name in the API; default: from the model")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 for any free one")
    api_key: SecretStr | None = Field(
        None, min_length=1, description="bearer key that every route but /health, /ready and /metrics asks for"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Dtype = Field(
        "auto", description="weights and activations; auto: the checkpoint's, but never float16 on a CPU"
    )
    native_length: int | None = Field(
        None, ge=2, description="tokens to treat as the native length; for trying growth on short texts"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="prompt and generation together, in tokens; default: 4 x the native length"
    )
    growth: Literal["stop"] = Field("stop", description="what a request does when it outgrows its plan")
    rope_reserve: int = Field(2048, ge=1, description="generated tokens that a static plan makes room for, at most")
    kv_cache_memory: ByteSize | None = Field(
        None,
        ge=1,
        description="bytes for the cache (2GiB); default: of the free memory a quarter on a CPU, 85 % on CUDA",
    )
    kv_cache_dtype: Dtype = Field("auto", description="of cached keys and values; auto: the model's")
    max_batch_tokens: int = Field(512, ge=1, description="tokens computed in one step, at most")
    max_running: int = Field(64, ge=1, description="requests that run at a time, at most")
    max_queued: int = Field(256, ge=1, description="requests that wait to run, at most")
    max_body_bytes: ByteSize = Field(ByteSize(16 * 2**20), ge=1, description="size of a request body, at most")
    sse_keepalive_seconds: float = Field(15, gt=0, description="silence after which a stream sends a comment")
    shutdown_seconds: int = Field(30, ge=0, description="how long running requests may finish after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line to log")

    @model_validator(mode="after")
    def _every_running_request_gets_a_token(self) -> Self:
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_running ({self.max_running})"
            )
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
    if not file.is_file():
        raise StartupError(f"the settings file {file} does not exist")
    parsers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
    }
    if file.suffix not in parsers:
        raise StartupError(f"the settings file {file} must end in {', '.join(parsers)}")
    content = _read(file, parsers[file.suffix])

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


def _read(file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        content = parse(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise StartupError(f"the settings file {file} cannot be read: {' '.join(str(error).split())}") from error
    if content is None:  # YAML's way to read an empty file
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise StartupError(f"the settings file {file} must hold settings by name")
    return content
