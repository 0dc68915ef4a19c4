"""uvicorn's HTTP protocol, which gives up on a client that does not finish the head of its request.

Bodies are watched by `service.api.body_limit`, answers by the kernel (`service.commands.serve`), idle connections by
uvicorn itself.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class ImpatientProtocol(HttpToolsProtocol):
    """Closes a connection on which no head of a request is complete after a while."""

    def __init__(self, *arguments: Any, head_timeout: float, **options: Any) -> None:
        """
        Args:
            arguments: uvicorn's.
            head_timeout: seconds from the connection, or from the begin of a later request, to the end of its head.
            options: uvicorn's.
        """
        super().__init__(*arguments, **options)
        self._head_timeout = head_timeout
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._waiting is None:
            self._wait()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self._head_timeout, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
