"""From what the user named to a folder that can be loaded: a folder, a GGUF file, a hub name, or nothing.

Knows where models are found. Does not know whether they can be served.
"""

import hashlib
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from model_patches.errors import ModelNotFoundError
from model_patches.loading.cache import build_once
from model_patches.loading.convert import convert_gguf
from model_patches.loading.embedded import DEFAULT_MODEL_NAME, default_model_folder
from model_patches.loading.gguf_parts import model_name_of, parts_of
from model_patches.loading.version import CONVERTER_VERSION

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
# Sub-folders hold other formats of the same weights, and so does Mistral's consolidated file.
_NOT_FROM_HUB = ["*/*", "consolidated*.safetensors"]


def resolve_config(name: str | None, *, cache_dir: Path, revision: str | None = None) -> Path:
    """A folder that holds the config.json behind a name; of a hub model nothing larger is downloaded.

    Args and errors as for `resolve_model`.
    """
    if name is not None and _is_on_hub(name):
        return _from_hub(name, revision, ["*.json"])
    return resolve_model(name, cache_dir=cache_dir, revision=revision)


def resolve_model(
    name: str | None, *, cache_dir: Path, revision: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The Hugging Face folder behind a name. May download from the hub, and may convert a GGUF file once.

    Args:
        name: a folder, a .gguf file (any part of several) or a hub name; None or its own name for the embedded default,
            which is not downloaded here.
        cache_dir: where converted models are kept.
        revision: branch, tag or commit of a hub name.
        trust_remote_code: also fetch the Python code that a hub model brings.

    Raises:
        ModelNotFoundError: nothing is there under that name, or it has no revisions; the message says where it was
            looked for.
        UnsupportedModelError, DamagedModelError: a GGUF file that cannot be converted.
        CacheFolderError: the cache folder cannot be written.
    """
    if name is not None and _is_on_hub(name):
        return _from_hub(name, revision, [*_HUB_FILES, *(["*.py"] if trust_remote_code else [])])
    if revision is not None:
        raise ModelNotFoundError(
            f"only a model of the hub has revisions, such as {revision!r}; {name or 'the default model'} is not there"
        )
    if name is None or _is_default(name):
        return _embedded_default(cache_dir)
    path = Path(name).expanduser()
    if path.is_dir():
        return _model_folder(path)
    if path.is_file():
        return _converted_gguf(path, cache_dir)
    raise ModelNotFoundError(f"model {name!r} not found: there is no such folder or file, and it is not a hub name")


def _is_on_hub(name: str) -> bool:
    path = Path(name).expanduser()
    is_hub_name = path.suffix.lower() != ".gguf" and _HUB_NAME.fullmatch(name) is not None
    return is_hub_name and not path.exists() and not _is_default(name)


def _is_default(name: str) -> bool:
    return name == DEFAULT_MODEL_NAME and not Path(name).exists()


def _embedded_default(cache_dir: Path) -> Path:
    folder = default_model_folder(cache_dir)
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"no model was named, and the default model is not in {cache_dir}; "
            "run `ropewalk fetch-default` once, or name a model"
        )
    return folder


def _model_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    hint = f"; it holds GGUF files: name one of them, such as {ggufs[0]}" if ggufs else ""
    raise ModelNotFoundError(f"{path} is not a Hugging Face model folder: it has no config.json{hint}")


def _converted_gguf(path: Path, cache_dir: Path) -> Path:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFoundError(f"{path} is neither a model folder nor a .gguf file")
    files = [part.resolve() for part in parts_of(path)]
    facts = [(file, file.stat()) for file in files]
    identity = [f"{file}\n{stat.st_size}\n{stat.st_mtime_ns}" for file, stat in facts]
    key = hashlib.sha256("\n".join([*identity, str(CONVERTER_VERSION)]).encode()).hexdigest()[:16]
    return build_once(
        cache_dir / "models" / f"{model_name_of(files[0])}-{key}", lambda folder: convert_gguf(path, folder)
    )


def _from_hub(name: str, revision: str | None, files: list[str]) -> Path:
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=_NOT_FROM_HUB)
    except Exception as error:  # the hub's client lets the errors of its transport through
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFoundError(
            f"model {name!r}{at} not found: it is not a folder or file here, and {_hub_reason(error)}"
        ) from error
    return _model_folder(Path(folder))


def _hub_reason(error: Exception) -> str:
    match error:
        case GatedRepoError():
            return "on the hub it is only for those who were granted access: ask for it there and set HF_TOKEN"
        case RepositoryNotFoundError():
            return "the hub has no such model (if it is private, set HF_TOKEN)"
        case RevisionNotFoundError():
            return "the hub has the model but not that revision"
        case LocalEntryNotFoundError():
            return "the hub cannot be asked (no network, or HF_HUB_OFFLINE is set), nor has it been fetched before"
        case _:
            return f"the hub could not give it: {error}"
