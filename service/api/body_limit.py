"""How large a request's body may be. FastAPI's own limit answers in plain text; here the error handlers answer."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware that stops a route which reads more than so many bytes, or is about to."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = int(Headers(scope=scope).get("content-length", 0))
        received = 0

        async def receive_within_limit() -> Message:
            nonlocal received
            if announced <= self._max_bytes:
                message = await receive()
                received += len(message.get("body", b""))
                if received <= self._max_bytes:
                    return message
            raise HTTPException(413, f"the body has more than {self._max_bytes} bytes")

        await self._app(scope, receive_within_limit, send)
