"""The bearer key. Knows one header; every path is closed unless it is named here."""

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.schemas import ErrorBody, ErrorResponse

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class BearerKey:
    """ASGI middleware that answers 401 unless `Authorization: Bearer <key>` is right."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = ErrorBody(
            message="a valid key is needed: Authorization: Bearer <key>",
            type="authentication_error",
            param=None,
            code="invalid_api_key",
        )
        body = ErrorResponse(error=error).model_dump()
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
