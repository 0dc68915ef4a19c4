"""`ropewalk serve`: a server's life from settings to its last request."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, disable_created_metrics

from service import build
from service.app import create_app
from service.cli import load_settings
from service.metrics import Metrics

SECONDS_FOR_LAST_WORDS = 5  # for telling clients that their requests were cancelled


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which on SIGTERM takes no more connections and waits for requests to finish. Those that have
    not finished in time are cancelled and told so, before uvicorn closes their connections."""

    def __init__(self, config: uvicorn.Config, drain_seconds: float) -> None:
        super().__init__(config)
        self._drain_seconds = drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cancelling = asyncio.get_running_loop().call_later(self._drain_seconds, self._cancel_requests)
        await super().shutdown(sockets)
        cancelling.cancel()

    def _cancel_requests(self) -> None:
        assert isinstance(self.config.app, FastAPI)
        if (loaded := self.config.app.state.server.loaded) is not None:
            asyncio.get_running_loop().run_in_executor(None, loaded.engine.stop)


def serve(arguments: Mapping[str, Any]) -> None:
    """Serve a model over HTTP until SIGTERM or SIGINT.

    Raises:
        StartupError: the server cannot start.
    """
    settings = load_settings(arguments)
    # uvicorn drains on the first signal and raises it again once all is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    inspected = build.inspect(settings)
    disable_created_metrics()
    metrics = Metrics(CollectorRegistry())
    failures: list[Exception] = []

    def stop(error: Exception) -> None:
        failures.append(error)
        uvicorn_server.should_exit = True

    app = create_app(settings, inspected, metrics, lambda: build.load(settings, inspected, metrics), stop)
    uvicorn_server = DrainingServer(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            log_level=settings.log_level,
            access_log=settings.log_level == "debug",
            timeout_graceful_shutdown=settings.shutdown_seconds + SECONDS_FOR_LAST_WORDS,
        ),
        drain_seconds=settings.shutdown_seconds,
    )
    uvicorn_server.run()
    if failures:
        raise failures[0]
