"""`ropewalk serve`: a server's life from settings to its last request."""

import asyncio
import signal
import socket
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, disable_created_metrics
from starlette.datastructures import State

from service import build, logs
from service.app import create_app
from service.cli import load_settings
from service.metrics import Metrics
from service.settings import Settings

SECONDS_FOR_LAST_WORDS = 5  # for telling clients that their requests were cancelled
SECONDS_BETWEEN_LOOKS = 0.1  # as uvicorn itself looks whether it should end


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which on SIGTERM or SIGINT lets requests finish before it closes its port.

    Until then it says that it is not ready and takes no new ones: load balancers need a while to notice. Requests that
    have not finished in time are cancelled and told so. A second signal ends the process at once.
    """

    def __init__(self, config: uvicorn.Config, settings: Settings) -> None:
        super().__init__(config)
        self._settings = settings

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            cut_off_slow_clients(server, self._settings.client_timeout_seconds)
        if self._settings.api_key_file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._state.keys.reload)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        server, loop = self._state.server, asyncio.get_running_loop()
        server.is_draining = True
        end = loop.time() + self._settings.shutdown_seconds
        cancelling = loop.call_at(end, self._cancel_requests)
        while not server.traffic.is_idle and loop.time() < end:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        # What was still being read when the signal came has the rest of the time.
        self.config.timeout_graceful_shutdown = SECONDS_FOR_LAST_WORDS + max(0, round(end - loop.time()))
        await super().shutdown(sockets)
        cancelling.cancel()

    def _cancel_requests(self) -> None:
        if (loaded := self._state.server.loaded) is not None:
            asyncio.get_running_loop().run_in_executor(None, loaded.engine.stop)

    @property
    def _state(self) -> State:
        assert isinstance(self.config.app, FastAPI)
        return self.config.app.state


def cut_off_slow_clients(server: asyncio.Server, seconds: float) -> None:
    """Have the kernel close connections whose client takes nothing of what waits for it for so long.

    That is for connections from here on: they inherit it from the socket that they come in by. A connection that is
    closed cancels its request, as when the client goes away.
    """
    for listener in server.sockets:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(seconds * 1000)))


def serve(arguments: Mapping[str, Any]) -> None:
    """Serve a model over HTTP until SIGTERM or SIGINT.

    Raises:
        StartupError: the server cannot start.
    """
    settings = load_settings(arguments)
    # uvicorn ends on the first signal and raises it again once all is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    logs.configure(settings.log_level, settings.log_format)
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
        ),
        settings,
    )
    uvicorn_server.run()
    if failures:
        raise failures[0]
