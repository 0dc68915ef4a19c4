"""Bearer keys: which there are, and who has one. Knows one header; every path is closed unless it is named here."""

import hmac
import logging
from collections.abc import Collection
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.errors import refuse
from service.errors import KeyRequiredError, StartupError
from service.metrics import Metrics
from service.settings import Settings

logger = logging.getLogger(__name__)

PROBED_PATHS = frozenset({"/health", "/ready"})

caller: ContextVar[bytes | None] = ContextVar("caller", default=None)
"""The digest of the key that the running code serves; None where no key is asked for."""


class Keys:
    """The keys that are valid now, kept as digests: those have one length, so that comparing them tells nothing."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            StartupError: the key file cannot be read, or has no key.
        """
        self._file = settings.api_key_file
        key = settings.api_key
        self._from_settings = [] if key is None else [_digest(key.get_secret_value().encode())]
        self._digests = self._read()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def reload(self) -> None:
        """Read the file again; the keys stay what they were if it cannot be read."""
        try:
            self._digests = self._read()
        except StartupError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("the keys were read again: %d", len(self._digests))

    def find(self, key: bytes) -> bytes | None:
        """The digest of a key, None if it is not valid. Takes the same time whichever it is."""
        given = _digest(key)
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given if any(found) else None

    def find_bearer(self, authorization: bytes) -> bytes | None:
        """The same of an Authorization header, empty where there is none."""
        scheme, _, key = authorization.partition(b" ")
        return self.find(key.strip()) if scheme.lower() == b"bearer" else None

    def _read(self) -> list[bytes]:
        if self._file is None:
            return self._from_settings
        return [*self._from_settings, *map(_digest, read_keys(self._file))]


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def read_keys(file: Path) -> list[bytes]:
    """The keys of a file: one a line, `#` begins a comment line.

    Raises:
        StartupError: it cannot be read, or has no key.
    """
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise StartupError(f"the key file {file} cannot be read: {error}") from error
    keys = [line.encode() for line in lines if line and not line.startswith("#")]
    if not keys:
        raise StartupError(f"the key file {file} has no key: it takes one a line")
    return keys


class BearerKey:
    """ASGI middleware that answers 401 unless `Authorization: Bearer <key>` is right."""

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Collection[str], metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            found = self._keys.find_bearer(given)
            caller.set(found)
            if found is None:
                error = KeyRequiredError("a valid key is needed: Authorization: Bearer <key>")
                answer = refuse(error, self._metrics)
        await answer(scope, receive, send)
