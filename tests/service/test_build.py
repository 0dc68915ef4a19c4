"""What is derived from a model's parts when a server is assembled."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from model_patches.errors import DamagedModelError
from model_patches.kernels import build
from model_patches.loading.load import load_tokenizer
from model_patches.loading.weights import load_weights, stand_in_config
from model_patches.pages import KeyValuePages
from service.build import inspect, load, longest_token_bytes, records_decoding
from service.build import load_weights as load_weights_and_patch
from service.cache.pool import CacheShape, allocate_pool
from service.cli import load_settings
from service.errors import StartupError
from service.metrics import Metrics
from service.scaling.policy import Policy
from service.settings import Settings
from tests.recording import TapeRecorder
from tests.reference.growing import tiny
from tests.reference.supported import FAMILIES
from tests.serving import byte_tokenizer


def byte_level(dropped: str = "") -> Tokenizer:
    """A byte-level BPE with a token for every byte but those dropped, one merge and one special token."""
    letters = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in dropped]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate([*letters, "ab"])}, [("a", "b")]))
    tokenizer.add_special_tokens([AddedToken("<start>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


COMPLETE = byte_level()


@given(st.one_of(st.text(), st.text(alphabet="ab<start>\x06é🦜")))
@settings(deadline=None, max_examples=300)
def test_no_text_has_fewer_tokens_than_its_bytes_and_the_longest_token_allow(text: str) -> None:
    longest = longest_token_bytes(COMPLETE)
    assert longest == len("<start>")
    assert len(COMPLETE.encode(text, add_special_tokens=False).ids) * longest >= len(text.encode())


def test_bytes_say_nothing_where_the_tokenizer_drops_some_or_rewrites_text(embedded_model_folder: Path) -> None:
    assert longest_token_bytes(byte_level(dropped="z")) is None
    rewriting = byte_level()
    rewriting.normalizer = normalizers.NFC()
    assert longest_token_bytes(rewriting) is None
    assert longest_token_bytes(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
    embedded: Tokenizer = load_tokenizer(embedded_model_folder).backend_tokenizer
    assert embedded.encode("\x06", add_special_tokens=False).ids == []
    assert longest_token_bytes(embedded) is None


KV_DTYPES = {
    **{"auto": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16},
    **{"fp32": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "float8_e4m3fn": torch.float8_e4m3fn},
}


@pytest.mark.parametrize("name", KV_DTYPES)
def test_the_cache_is_of_the_type_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, embedded_model_folder: Path, name: str
) -> None:
    made: list[CacheShape] = []

    def record(shape: CacheShape, num_pages: int, device: torch.device) -> list[KeyValuePages]:
        made.append(shape)
        return allocate_pool(shape, num_pages, device)

    monkeypatch.setattr("service.build.allocate_pool", record)
    chosen = Settings.model_validate(
        {
            **{"model": str(embedded_model_folder), "device": "cpu", "dtype": "float32", "kv_cache_dtype": name},
            **{"kv_cache_memory": "64MiB", "max_model_len": 64, "native_length": 64},
        }
    )
    server = load(chosen, inspect(chosen), Metrics(CollectorRegistry()))  # runs a prefill and a decode to warm up
    server.engine.stop()
    assert [(shape.dtype, shape.key_dim, shape.value_dim) for shape in made] == [(KV_DTYPES[name], 64, 64)]


@pytest.mark.parametrize(("length", "places"), [(256, 1), (24, 3)])
def test_layers_that_see_windows_share_a_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int, places: int
) -> None:
    config = FAMILIES["gemma3, windows with a base of their own"]
    tiny(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    made: list[tuple[CacheShape, int]] = []

    def record(shape: CacheShape, num_pages: int, device: torch.device) -> list[KeyValuePages]:
        made.append((shape, num_pages))
        return allocate_pool(shape, num_pages, device)

    monkeypatch.setattr("service.build.allocate_pool", record)
    chosen = Settings.model_validate(
        {
            **{"model": str(tmp_path), "device": "cpu", "dtype": "float32", "max_batch_tokens": 32, "max_running": 8},
            **{"kv_cache_memory": "1MiB", "max_model_len": length},
        }
    )
    metrics = Metrics(CollectorRegistry())
    server = load(chosen, inspect(chosen), metrics)  # runs a prefill and a decode to warm up
    server.engine.stop()
    [(shape, num_pages)] = made
    page_bytes = places * 16 * 2 * (16 + 16) * 4
    assert (shape.layers, shape.page_bytes, num_pages) == (places, page_bytes, 2**20 // page_bytes)
    # 256 tokens are 16 pages; 19 + 32 tokens, wherever they begin, are in 5 at most of each windowed layer.
    each = 16 + 2 * 5 if places == 1 else 24 / 16
    assert metrics.registry.get_sample_value("ropewalk_kv_cache_max_length_requests") == pytest.approx(num_pages / each)
    assert metrics.registry.get_sample_value("ropewalk_kv_cache_bytes") == num_pages * page_bytes


@pytest.mark.parametrize(
    ("device", "settings", "recorded"),
    [
        ("cuda", {}, True),
        ("cuda", {"cuda_graphs": False}, False),
        ("cuda", {"tensor_parallel": 2}, False),
        ("cpu", {}, False),
    ],
)
def test_decode_steps_are_recorded_on_cuda_alone(device: str, settings: dict[str, Any], recorded: bool) -> None:
    assert records_decoding(Settings.model_validate(settings), torch.device(device)) == recorded


def test_a_server_that_records_has_a_page_more_than_it_gives_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not build.load():
        pytest.skip("there is no compiler")
    tiny(FAMILIES["olmo2"]).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    made, recorder = [0], TapeRecorder()

    def record(shape: CacheShape, num_pages: int, device: torch.device) -> list[KeyValuePages]:
        made[0] = num_pages
        return allocate_pool(shape, num_pages, device)

    monkeypatch.setattr("service.build.allocate_pool", record)
    monkeypatch.setattr("service.build.records_decoding", lambda *_: True)
    monkeypatch.setattr("service.build.CudaRecorder", lambda: recorder)
    chosen = Settings.model_validate(
        {"model": str(tmp_path), "device": "cpu", "dtype": "float32", "kv_cache_memory": "1MiB", "max_running": 3}
    )
    metrics = Metrics(CollectorRegistry())
    load(chosen, inspect(chosen), metrics).engine.stop()
    assert metrics.registry.get_sample_value("ropewalk_kv_cache_pages") == made[0] - 1
    assert (recorder.recordings, recorder.replays) == (3, 3)  # of 1, 2 and 4 rows; each was tried once


@pytest.mark.parametrize(
    ("dtype", "operators", "knows", "warned"),
    [
        ("bf16", False, False, True),
        ("bf16", False, True, False),
        ("fp32", False, False, False),
        ("bf16", True, False, False),
    ],
)
def test_slow_products_are_warned_of_where_layers_are_not_fused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    operators: bool,
    knows: bool,
    warned: bool,
) -> None:
    if operators and not build.load():
        pytest.skip("there is no compiler")
    tiny(FAMILIES["llama"]).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: knows)
    chosen = Settings.model_validate(
        {"model": str(tmp_path), "device": "cpu", "dtype": dtype, "cpu_operators": operators}
    )
    load_weights_and_patch(chosen, inspect(chosen))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [("dtype float32 is faster" in message) for message in told] == [True] * warned


def with_config(original: Path, folder: Path, **changes: Any) -> Path:
    """A folder of the same files, its config changed."""
    for file in original.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((original / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


NOT_IN_TRANSFORMERS = {
    "ntk": {"rope_type": "ntk", "factor": 2.0, "rope_theta": 1e5},
    "ntk-by-parts": {"type": "ntk-by-parts", "factor": 2.0, "rope_theta": 1e5},
    "dynamic-yarn": {"type": "dynamic-yarn", "original_max_position_embeddings": 4096, "rope_theta": 1e5},
}


@pytest.mark.parametrize("scheme", NOT_IN_TRANSFORMERS)
def test_a_models_own_scheme_need_not_be_known_to_transformers(
    embedded_model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], scheme: str
) -> None:
    folder = with_config(embedded_model_folder, tmp_path, rope_parameters=NOT_IN_TRANSFORMERS[scheme])
    chosen = Settings.model_validate(
        {"model": str(folder), "device": "cpu", "kv_cache_memory": "64MiB", "max_model_len": 64}
    )
    inspected = inspect(chosen)
    assert isinstance(inspected.policy, Policy)
    assert inspected.policy.geometry.scheme == scheme
    load(chosen, inspected, Metrics(CollectorRegistry())).engine.stop()  # runs a prefill and a decode to warm up
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "ntk", "factor": 2.0, "partial_rotary_factor": 0.75}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "ntk", "factor": 2.0, "partial_rotary_factor": 0.75, "rope_theta": 5e5}},
    ],
)
def test_all_but_the_scheme_is_kept_for_transformers(tmp_path: Path, config: Mapping[str, Any]) -> None:
    stand_in = stand_in_config({"model_type": "glm4", "hidden_size": 512, **config}, named=tmp_path)
    assert stand_in is not None
    assert stand_in.hidden_size == 512
    assert stand_in.rope_parameters == {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.75}


@pytest.mark.parametrize("config", [{"model_type": "llamas"}, {"model_type": "llama", "hidden_size": "many"}, {}])
def test_a_config_that_transformers_cannot_use_is_refused_in_words(tmp_path: Path, config: Mapping[str, Any]) -> None:
    with pytest.raises(DamagedModelError, match=f"the config of {tmp_path} cannot be used"):
        stand_in_config({**config, "rope_parameters": NOT_IN_TRANSFORMERS["ntk"]}, named=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DamagedModelError, match=f"the weights of {tmp_path} do not fit its config"):
        load_weights(tmp_path, named=tmp_path, local_files_only=True)


MEMORY = {
    **{"2GiB": 2 * 2**30, "1.5MB": 1_500_000, "1000": 1000, "1": 1, 4096: 4096},
    **{"0.5": 0.5, "50%": 0.5, " 12.5 % ": 0.125, "100%": 1.0, "1.0": 1.0, ".25": 0.25, 0.75: 0.75},
}


@pytest.mark.parametrize("value", MEMORY)
def test_memory_is_bytes_or_a_share(value: str | float) -> None:
    understood = Settings.model_validate({"kv_cache_memory": value}).kv_cache_memory
    assert understood == MEMORY[value]
    assert type(understood) is type(MEMORY[value])


@pytest.mark.parametrize(
    "value", ["1.5", "0.0", "0%", "101%", "nan%", "inf", "-1", "-0.5", ".", "%", "lots", 0, 2.0, True]
)
def test_memory_that_is_neither_is_refused_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(StartupError) as refusal:
        load_settings({"kv_cache_memory": value})
    assert str(refusal.value).startswith("--kv-cache-memory: ")
    assert "bytes (2GiB), or a share of the free memory above 0 and at most 1 (0.5 or 50%)" in str(refusal.value)
    assert str(refusal.value).endswith(f"it is {value!r}")
