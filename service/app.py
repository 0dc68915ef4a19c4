"""The FastAPI application: routes, errors and the life of the engine behind them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from typing import Any

from fastapi import FastAPI

from service.api import document, generating, health, limits, models
from service.api.auth import PROBED_PATHS, BearerKey, Keys
from service.api.body_limit import BodyLimit
from service.api.cors import allow_origins
from service.api.errors import install_error_handlers
from service.api.state import Server, Traffic
from service.build import InspectedModel, LoadedServer
from service.engine.handle import Mailbox
from service.errors import NotReadyError
from service.logs import RequestIds
from service.metrics import Metrics
from service.playground import page
from service.settings import Settings
from service.tracing.hook import UNTRACED, Tracing

SECONDS_BETWEEN_HEALTH_CHECKS = 1.0


def create_app(
    settings: Settings,
    inspected: InspectedModel,
    metrics: Metrics,
    load: Callable[[], LoadedServer],
    on_failure: Callable[[Exception], None],
    tracing: Tracing = UNTRACED,
) -> FastAPI:
    """Make the application of one server.

    Args:
        settings: of the server.
        inspected: the model, its weights not loaded yet.
        metrics: of the server.
        load: loads the weights and starts the engine; called once, off the event loop, while `/ready` answers 503.
        on_failure: called on the event loop when `load` raises.
        tracing: of the requests that have a valid key, where keys are asked for; stopped with the server.

    Raises:
        StartupError: the file of keys cannot be read.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        server = app.state.server = Server(settings, inspected, metrics, Mailbox(loop), Traffic(settings, metrics))

        metrics.ready.set_function(lambda: server.is_ready)

        def load_in_background() -> None:
            try:
                report: Callable[[], None] = partial(server.set_loaded, load())
            except Exception as error:  # noqa: BLE001 - whatever it is, the server cannot serve
                report = partial(on_failure, error)
            with suppress(RuntimeError):  # a closed loop: the server was stopped meanwhile
                loop.call_soon_threadsafe(report)

        # A daemon, so that a server that is told to stop meanwhile does not wait for it.
        threading.Thread(target=load_in_background, name="load", daemon=True).start()
        watching = asyncio.create_task(_watch(server))
        yield
        watching.cancel()
        if server.loaded is not None:
            await asyncio.to_thread(server.loaded.engine.stop)
        await asyncio.to_thread(tracing.stop)

    app = FastAPI(
        title="Ropewalk",
        summary="Inference for RoPE models; every request gets the positional scaling that its length needs.",
        lifespan=lifespan,
    )
    keys = app.state.keys = Keys(settings)
    # The last is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, max_silence=settings.client_timeout_seconds)
    app.add_middleware(tracing.traced)
    open_paths = PROBED_PATHS if settings.metrics_need_key else PROBED_PATHS | {"/metrics"}
    if settings.playground:
        open_paths |= page.PATHS
        page.add_to(app)
    if keys:
        app.add_middleware(BearerKey, keys=keys, open_paths=open_paths, metrics=metrics)
    allow_origins(app, settings)
    app.add_middleware(RequestIds)
    install_error_handlers(app, metrics)
    for router in (generating.router, models.router, health.router):
        app.include_router(router)

    @cache
    def description() -> dict[str, Any]:
        """Made when somebody asks for it: that takes a third of a second, which a start need not wait for."""
        described = FastAPI.openapi(app)
        limits.in_schema(settings, described)
        document.complete(settings, inspected.policy, open_paths if keys else None, described)
        return described

    app.openapi = description  # type: ignore[method-assign]
    return app


async def _watch(server: Server) -> None:
    """See to the server's health, so that trouble is logged even where nobody asks for it."""
    while True:
        with suppress(NotReadyError):
            server.check_health()
        await asyncio.sleep(SECONDS_BETWEEN_HEALTH_CHECKS)
