"""`ropewalk serve`: a server's life from settings to its last request."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, disable_created_metrics
from starlette.datastructures import State

from service import build, logs, process
from service.app import create_app
from service.cli import load_settings, naming_sources
from service.distributed import spawned
from service.distributed.follower import follow
from service.distributed.leader import Leader
from service.distributed.meeting import MetRanks, StartedRanks
from service.distributed.place import Place, given_place
from service.errors import StartupError
from service.http_protocol import ImpatientProtocol
from service.listening import listening, url_of
from service.metrics import Metrics
from service.settings import Settings
from service.tracing.hook import UNTRACED
from service.tracing.start import start

logger = logging.getLogger(__name__)

SECONDS_FOR_LAST_WORDS = 5  # for telling clients that their requests were cancelled
SECONDS_AFTER_LOSS = 15  # of a rank, for telling clients that their requests have failed
EXIT_STATUS = 2  # as for every error that ends a command
SECONDS_BETWEEN_LOOKS = 0.1  # as uvicorn itself looks whether it should end


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which on SIGTERM or SIGINT lets requests finish before it closes its port.

    Until then it says that it is not ready and takes no new ones: load balancers need a while to notice. Requests that
    have not finished in time are cancelled and told so. A second signal ends the process at once.
    """

    def __init__(self, config: uvicorn.Config, settings: Settings) -> None:
        super().__init__(config)
        self._settings = settings
        self._has_said_ready = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            cut_off_slow_clients(server, self._settings.client_timeout_seconds)
        logger.info("running on %s; the model is being loaded", self._url)
        if self._settings.api_key_file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._state.keys.reload)

    async def on_tick(self, counter: int) -> bool:
        if not self._has_said_ready and self._state.server.loaded is not None:
            self._has_said_ready = True
            url = self._url
            logger.info("ready: %s takes requests, %s/docs describes them", url, url, extra={"fields": {"url": url}})
        return await super().on_tick(counter)

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
    def _url(self) -> str:
        return url_of(self._settings.host, self.servers[0].sockets[0])

    @property
    def _state(self) -> State:
        assert isinstance(self.config.app, FastAPI)
        return self.config.app.state


@contextmanager
def leading(settings: Settings, place: Place | None, stop: Callable[[Exception], None]) -> Iterator[Leader | None]:
    """The other processes that the model is split over, as long as the block runs; None where there are none.

    Args:
        settings: of the server.
        place: of this process among those that somebody else has started; None to start them here.
        stop: has the server end, for the reason given. Where that takes too long, for a step waits for a rank that is
            lost, the process ends as it is.
    """
    if settings.tensor_parallel == 1:
        yield None
        return

    def lose(error: Exception) -> None:
        stop(error)
        ending = threading.Timer(SECONDS_AFTER_LOSS, os._exit, (EXIT_STATUS,))
        ending.daemon = True
        ending.start()

    started = StartedRanks(settings.tensor_parallel, spawned.run) if place is None else MetRanks(place)
    leader = Leader(started, lose)
    try:
        yield leader
    finally:
        leader.close()


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
    if settings.ray is not None:
        serve_replicas(settings, arguments)
        return
    place = given_place(os.environ, settings.tensor_parallel)
    if place is not None and not place.leads:
        follow(place)
        return
    # uvicorn ends on the first signal and raises it again once all is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    logs.configure(settings.log_level, settings.log_format)
    log_changed(settings)
    with naming_sources(arguments, settings):
        inspected = build.inspect(settings)
    disable_created_metrics()
    telemetry = start(inspected.name) if settings.otel else None
    metrics = Metrics(CollectorRegistry(), None if telemetry is None else telemetry.journal)
    failures: list[Exception] = []

    def stop(error: Exception) -> None:
        failures.append(error)
        uvicorn_server.should_exit = True

    def load() -> build.LoadedServer:
        loaded = build.load(settings, inspected, metrics, leader)
        process.settle()
        return loaded

    app = create_app(settings, inspected, metrics, load, stop, telemetry or UNTRACED)
    uvicorn_server = DrainingServer(
        uvicorn.Config(
            app,
            http=cast(Any, partial(ImpatientProtocol, head_timeout=settings.client_timeout_seconds)),
            log_config=None,
            log_level=settings.log_level,
            access_log=settings.log_level == "debug",
        ),
        settings,
    )
    with listening(settings.host, settings.port) as listeners, leading(settings, place, stop) as leader:
        uvicorn_server.run(listeners)
    if failures:
        raise failures[0]


def serve_replicas(settings: Settings, arguments: Mapping[str, Any]) -> None:
    """Serve a model by several replicas on Ray.

    Raises:
        StartupError: the extra ray is not installed, or the replicas cannot start.
    """
    try:
        from service.replicas.run import run
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise StartupError(f"ray ({settings.ray}) needs the extra ray: pip install 'ropewalk[ray]'") from error
    logs.configure(settings.log_level, settings.log_format)
    log_changed(settings)
    with naming_sources(arguments, settings):
        build.read_policy(settings)
    run(settings)


def log_changed(settings: Settings) -> None:
    """Log the settings that differ from their defaults, of a secret only that there is one."""
    changed = settings.changed()
    listed = ", ".join(f"{name} {json.dumps(value)}" for name, value in changed.items())
    text = f"settings other than their defaults: {listed}" if changed else "all settings have their defaults"
    logger.info("%s", text, extra={"fields": {"settings": changed}})
