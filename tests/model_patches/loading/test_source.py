"""What the user may name, and what is said when it is not there."""

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub.constants
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from model_patches.errors import ModelNotFoundError
from model_patches.loading import source
from model_patches.loading.checkpoint import read_config
from model_patches.loading.embedded import DEFAULT_MODEL_NAME, default_model_folder
from model_patches.loading.source import resolve_config, resolve_model
from model_patches.loading.version import CONVERTER_VERSION

TinyGguf = Callable[..., Path]


@pytest.mark.parametrize("name", [None, DEFAULT_MODEL_NAME])
def test_no_name_and_its_own_mean_the_embedded_default(tmp_path: Path, name: str | None) -> None:
    default_model_folder(tmp_path).mkdir(parents=True)
    (default_model_folder(tmp_path) / "config.json").write_text("{}")
    for resolve in (resolve_model, resolve_config):
        assert resolve(name, cache_dir=tmp_path) == default_model_folder(tmp_path)


def test_a_folder_called_like_the_embedded_default_is_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(DEFAULT_MODEL_NAME).mkdir()
    (tmp_path / DEFAULT_MODEL_NAME / "config.json").write_text("{}")
    assert resolve_model(DEFAULT_MODEL_NAME, cache_dir=tmp_path / "cache") == Path(DEFAULT_MODEL_NAME)


def test_an_absent_default_is_not_downloaded_but_the_command_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="ropewalk fetch-default"):
        resolve_model(None, cache_dir=tmp_path)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), cache_dir=tmp_path / "cache") == tmp_path


def test_a_folder_of_gguf_files_says_to_name_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"name one of them, such as .*a\.gguf"):
        resolve_model(str(tmp_path), cache_dir=tmp_path / "cache")


def test_a_gguf_file_is_converted_once(tiny_gguf: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf()
    folder = resolve_model(str(path), cache_dir=tmp_path / "cache")
    assert read_config(folder)["hidden_size"] == 32
    monkeypatch.setattr(source, "convert_gguf", None)
    assert resolve_model(str(path), cache_dir=tmp_path / "cache") == folder
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    assert resolve_model(str(link), cache_dir=tmp_path / "cache") == folder


def test_another_content_time_or_converter_gives_another_entry(
    tiny_gguf: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf()
    monkeypatch.setattr(source, "convert_gguf", lambda _, folder: (folder / "config.json").write_text("{}"))

    def entry() -> Path:
        return resolve_model(str(path), cache_dir=tmp_path / "cache")

    entries = {entry()}
    os.utime(path, ns=(0, 1))
    entries.add(entry())
    path.write_bytes(path.read_bytes() + b"more")
    os.utime(path, ns=(0, 1))
    entries.add(entry())
    monkeypatch.setattr(source, "CONVERTER_VERSION", CONVERTER_VERSION + 1)
    entries.add(entry())
    assert len(entries) == 4


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFoundError, match=r"model\.bin is neither a model folder nor a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"), cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such", "a/b/c", "models/none.gguf", "-x"])
def test_what_cannot_be_a_hub_name_is_not_asked_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder or file, and it is not a hub name"):
        resolve_model(name, cache_dir=tmp_path)


def test_a_hub_name_offline_says_both_what_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(
        ModelNotFoundError, match=r"'nobody/nothing'.*not a folder or file here.*nor has it been fetched before"
    ):
        resolve_model("nobody/nothing", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (GatedRepoError, "only for those who were granted access.*HF_TOKEN"),
        (RepositoryNotFoundError, r"no such model \(if it is private, set HF_TOKEN\)"),
        (RevisionNotFoundError, "has the model but not that revision"),
        (HfHubHTTPError, "could not give it: 500"),
    ],
)
def test_what_the_hub_answers_is_put_in_plain_words(
    refusal: type[HfHubHTTPError], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise refusal("500", response=Mock(headers={}))

    monkeypatch.setattr(source, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=f"'org/model' at revision 'v1' not found.*{reason}"):
        resolve_model("org/model", cache_dir=tmp_path, revision="v1")


def test_from_the_hub_come_no_pickles_and_code_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert "*/*" in ignore_patterns
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(source, "snapshot_download", download)
    assert resolve_model("org/model", cache_dir=tmp_path, revision="v1") == tmp_path
    resolve_model("org/model", cache_dir=tmp_path, trust_remote_code=True)
    plain, trusted = asked
    assert plain[:2] == ("org/model", "v1")
    assert not [pattern for pattern in plain[2] if pattern.endswith((".bin", ".py", ".pt")) or pattern == "*"]
    assert "*.safetensors" in plain[2]
    assert "*.py" in trusted[2]
