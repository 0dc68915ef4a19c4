"""The bearer key. Knows one header; every path is closed unless it is named here."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.errors import refuse
from service.errors import KeyRequiredError
from service.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class BearerKey:
    """ASGI middleware that answers 401 unless `Authorization: Bearer <key>` is right."""

    def __init__(self, app: ASGIApp, key: str, metrics: Metrics) -> None:
        self._app = app
        self._key = key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
            error = KeyRequiredError("a valid key is needed: Authorization: Bearer <key>")
            answer = refuse(error, self._metrics)
        await answer(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
