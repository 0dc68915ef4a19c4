"""The folder where converted models are kept, and how an entry comes to be there: whole, or not at all.

Knows the file system. Does not know what an entry holds.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from model_patches.errors import CacheFolderError

_log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """$ROPEWALK_CACHE, else $XDG_CACHE_HOME/ropewalk, else ~/.cache/ropewalk. Need not exist yet."""
    if own := os.environ.get("ROPEWALK_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "ropewalk"
    return Path("~/.cache/ropewalk").expanduser()


def build_once(entry: Path, build: Callable[[Path], None]) -> Path:
    """Return `entry`, a folder; if it is not there, let `build` fill a folder beside it, then rename that into place.

    Of several processes one builds while the others wait for it. The lock lives as long as the process that holds
    it, so whatever a killed build left behind is known to be dead and is removed by the next one.

    Raises:
        CacheFolderError: the parent folder cannot be created or written.
        Whatever `build` raises; then nothing is left behind.
    """
    if entry.is_dir():
        return entry
    partial = entry.parent / f".{entry.name}.partial"
    with _locked(entry.parent / f".{entry.name}.lock"):
        if entry.is_dir():
            return entry
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            build(partial)
            _flush_to_disk(partial)
            partial.rename(entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return entry


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise CacheFolderError(
            f"the cache folder {path.parent} cannot be written ({error.strerror}); "
            "make it writable, or name another one in ROPEWALK_CACHE"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("another process is making it already; waiting for that (%s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush_to_disk(folder: Path) -> None:
    """Without this, a power cut soon after the rename could leave a complete-looking folder of empty files."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
