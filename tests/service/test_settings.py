"""Settings: their sources, their limits, and that nothing unknown is passed over."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.errors import StartupError
from service.scaling.options import RopePolicy, RungOptions
from service.settings import ROPE_OPTIONS, Settings, settings_class


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"ROPEWALK_{name.upper()}", raising=False)


def settings_of(cls: type[Settings] = Settings, **values: Any) -> Settings:
    return cls(**values)


def written(tmp_path: Path, name: str, text: str) -> Path:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.toml", 'max_running = 5\nkv_cache_memory = "2GiB"\napi_key = "k"\ntrust_remote_code = true\n'),
        ("s.yaml", "max_running: 5\nkv_cache_memory: 2GiB\napi_key: k\ntrust_remote_code: true\n"),
        ("s.yml", "max_running: 5\nkv_cache_memory: 2147483648\napi_key: k\ntrust_remote_code: true\n"),
    ],
)
def test_toml_and_yaml_files_are_read(tmp_path: Path, name: str, text: str) -> None:
    settings = settings_of(settings_class(written(tmp_path, name, text)))
    assert (settings.max_running, settings.kv_cache_memory, settings.trust_remote_code) == (5, 2 * 2**30, True)
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "k"


def test_the_environment_wins_over_the_file_and_arguments_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_file = settings_class(written(tmp_path, "s.toml", "max_running = 5\nmax_queued = 5\nport = 5\n"))
    monkeypatch.setenv("ROPEWALK_MAX_QUEUED", "6")
    monkeypatch.setenv("ROPEWALK_PORT", "6")
    settings = settings_of(from_file, port=7)
    assert (settings.max_running, settings.max_queued, settings.port) == (5, 6, 7)
    assert settings.max_batch_tokens == Settings.model_fields["max_batch_tokens"].default


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    for name in ("s.toml", "s.yaml"):
        assert settings_of(settings_class(written(tmp_path, name, ""))).model_dump() == settings_of().model_dump()


@pytest.mark.parametrize("text", ["max_runing = 5\n", "[serve]\nport = 5\n", "prefix = 'ROPEWALK'\n"])
def test_an_unknown_name_in_a_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        settings_of(settings_class(written(tmp_path, "s.toml", text)))
    (problem,) = refusal.value.errors()
    assert problem["type"] == "extra_forbidden"
    assert str(problem["loc"][0]) in text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        pytest.param("s.toml", b"port = ", "cannot be read", id="TOML cut off"),
        pytest.param("s.yaml", b"port: [1", "cannot be read", id="YAML cut off"),
        pytest.param("s.toml", b"\xff\xfe", "cannot be read", id="no text"),
        pytest.param("s.yaml", b"port: !!python/object/apply:os.getpid []", "cannot be read", id="YAML with code"),
        pytest.param("s.yaml", b"- port\n- 5\n", "must hold values by name", id="a list"),
        pytest.param("s.yaml", b"5: port\n", "must hold values by name", id="a number as name"),
        pytest.param("s.ini", b"port = 5", "must end in .toml, .yaml, .yml", id="another kind"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(StartupError) as refusal:
        settings_class(file)
    assert said in str(refusal.value)
    assert str(file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        settings_class(tmp_path / "s.toml")


LIMITS: list[tuple[str, Any, Any]] = [
    ("port", 0, -1),
    ("port", 65535, 65536),
    ("api_key", "k", ""),
    ("device", "cpu", "tpu"),
    ("dtype", "float32", "int4"),
    ("native_length", 2, 1),
    ("max_model_len", 2, 1),
    ("native_rope", "unscaled", "never"),
    ("rope_scheme", "ntk", 5),
    ("rope_ladder", "1.001", "1"),
    ("rope_ladder", "2,4", "4,2"),
    ("rope_reserve", 1, 0),
    ("rope_requests_may_choose", "scheme,factor", "theta"),
    ("growth", "reprefill", "sideways"),
    ("growth_refresh_tokens", 0, -1),
    ("prefix_reuse", "rerotate", "always"),
    ("kv_cache_memory", "1MiB", "lots"),
    ("kv_cache_memory", 1, 0),
    ("kv_cache_dtype", "fp32", "int3"),
    ("max_batch_tokens", 64, 0),
    ("max_running", 1, 0),
    ("max_queued", 1, 0),
    ("max_body_bytes", 1, 0),
    ("cors_origins", "https://a.example,http://b.example:3000", "https://a.example/"),
    ("cors_origins", "*", "a.example"),
    ("max_queued_tokens", 1, 0),
    ("max_requests_per_key", 1, 0),
    ("request_timeout_seconds", 0.001, 0),
    ("request_timeout_seconds", 1e9, "inf"),
    ("client_timeout_seconds", 0.001, 0),
    ("client_timeout_seconds", 2_000_000, 2_000_001),
    ("max_step_failures", 1, 0),
    ("step_timeout_seconds", 0.001, 0),
    ("sse_keepalive_seconds", 0.001, 0),
    ("shutdown_seconds", 0, -1),
    ("log_level", "debug", "chatty"),
    ("log_format", "json", "xml"),
]


@pytest.mark.parametrize(("name", "inside", "outside"), LIMITS)
def test_a_setting_takes_its_limit_and_nothing_beyond(name: str, inside: Any, outside: Any) -> None:
    settings_of(**{"api_key": "k"} | {name: inside})
    with pytest.raises(ValidationError) as refusal:
        settings_of(**{name: outside})
    assert refusal.value.errors()[0]["loc"][0] == name


@pytest.mark.parametrize(("name", "value"), [("max_requests_per_key", 5), ("metrics_need_key", True)])
def test_what_is_said_of_keys_needs_one(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=rf"{name} \({value}\) needs api_key or api_key_file"):
        settings_of(**{name: value})
    for key in ({"api_key": "k"}, {"api_key_file": tmp_path}):
        assert getattr(settings_of(**key | {name: value}), name) == value


@pytest.mark.parametrize(("tokens", "running", "accepted"), [(8, 8, True), (7, 8, False)])
def test_a_step_has_a_token_for_every_running_request(tokens: int, running: int, accepted: bool) -> None:
    if accepted:
        assert settings_of(max_batch_tokens=tokens, max_running=running).max_batch_tokens == tokens
        return
    with pytest.raises(ValidationError, match=r"max_batch_tokens \(7\) must be at least max_running \(8\)"):
        settings_of(max_batch_tokens=tokens, max_running=running)


def test_only_what_is_set_is_an_option_of_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of().rope_options() == {}
    monkeypatch.setenv("ROPEWALK_ROPE_LADDER", "1.5,2")
    monkeypatch.setenv("ROPEWALK_ROPE_REQUESTS_MAY_CHOOSE", "false")
    from_file = settings_class(written(tmp_path, "s.yaml", "rope_scheme: ntk\nmax_model_len: 64\ngrowth: null\n"))
    assert settings_of(from_file, native_length=32).rope_options() == {
        "scheme": "ntk",
        "ladder": (RungOptions(factor=1.5), RungOptions(factor=2)),
        "max_length": 64,
        "native_length": 32,
        "requests_may_choose": (),
    }


def test_every_option_of_the_policy_but_the_modes_has_a_setting() -> None:
    assert ROPE_OPTIONS.keys() == RopePolicy.model_fields.keys() - {"mode"}
    assert set(ROPE_OPTIONS.values()) <= Settings.model_fields.keys()


def test_a_ladder_in_a_settings_file_can_name_schemes(tmp_path: Path) -> None:
    file = written(tmp_path, "s.yaml", "rope_ladder: [1.5, {factor: 2, scheme: ntk}]\n")
    assert settings_of(settings_class(file)).rope_ladder == (
        RungOptions(factor=1.5),
        RungOptions(factor=2, scheme="ntk"),
    )


def test_the_key_is_not_in_what_is_printed_of_settings() -> None:
    assert "open-sesame" not in repr(Settings.model_validate({"api_key": "open-sesame"}))


def test_what_was_changed_is_told_as_json_has_it_and_of_a_secret_only_that_there_is_one(tmp_path: Path) -> None:
    assert settings_of().changed() == {}
    assert settings_of(port=8000, kv_cache_dtype="auto").changed() == {}
    changed = settings_of(
        api_key="open-sesame", api_key_file=tmp_path, port=5, kv_cache_memory="50%", rope_ladder="2,4", growth="stop"
    ).changed()
    assert json.loads(json.dumps(changed)) == {
        "api_key": "**********",
        "api_key_file": str(tmp_path),
        "port": 5,
        "kv_cache_memory": 0.5,
        "rope_ladder": [{"factor": 2.0}, {"factor": 4.0}],
        "growth": "stop",
    }


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())
