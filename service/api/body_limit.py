"""How large a request's body may be, and how long it may stay away. The error handlers answer what is beyond."""

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware that stops a route which reads more than so many bytes, or is about to, or waits too long for
    the next of them."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_silence: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_silence = max_silence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = int(Headers(scope=scope).get("content-length", 0))
        received = 0
        is_complete = False

        async def receive_within_limit() -> Message:
            nonlocal received, is_complete
            if is_complete:  # what comes now is the client's going away
                return await receive()
            if announced <= self._max_bytes:
                message = await self._receive_in_time(receive)
                received += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if received <= self._max_bytes:
                    return message
            raise HTTPException(413, f"the body has more than {self._max_bytes} bytes")

        await self._app(scope, receive_within_limit, send)

    async def _receive_in_time(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._max_silence):
                return await receive()
        except TimeoutError:
            message = f"nothing came of the body's rest for {self._max_silence:g} seconds"
            raise HTTPException(408, message, {"Connection": "close"}) from None
