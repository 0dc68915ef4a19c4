"""Log lines, as text or JSON, and the id that connects those of one HTTP request.

Prompts and outputs are never logged, nor what a client wrote into a field: lengths, plans, codes and times are.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LogFormat = Literal["text", "json"]
HEADER = "X-Request-Id"
MAX_ID_LENGTH = 128

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the HTTP request that the running code serves."""


class RequestIds:
    """ASGI middleware: each request has an id, the client's own or a new one, and its answer carries it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        own = given if is_valid_id(given) else uuid4().hex
        request_id.set(own)  # never taken back: the server runs each request in a context of its own

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = own
            await send(message)

        await self._app(scope, receive, send_with_id)


def is_valid_id(given: str) -> bool:
    """Whether a client's id is fit for headers and log lines: some printable ASCII, not much of it."""
    return 0 < len(given) <= MAX_ID_LENGTH and given.isascii() and given.isprintable()


class TextFormatter(logging.Formatter):
    """For people: one line, and the id of the request that it is about."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line, own = super().formatMessage(record), request_id.get()
        return line if own is None else f"{line} [{own}]"


class JsonFormatter(logging.Formatter):
    """For machines: one JSON object a line. What a call gives as `extra={"fields": {...}}` is part of it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (own := request_id.get()) is not None:
            line["request_id"] = own
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(level: str, log_format: LogFormat) -> None:
    """Write every logger's lines to stderr from here on; Python's warnings are among them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
