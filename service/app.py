"""The FastAPI application: routes, errors and the life of the engine behind them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from fastapi import FastAPI

from service.api import generating, health, models
from service.api.auth import BearerKey
from service.api.body_limit import BodyLimit
from service.api.errors import install_error_handlers
from service.api.state import Server
from service.build import InspectedModel, LoadedServer
from service.engine.handle import Mailbox
from service.metrics import Metrics
from service.settings import Settings


def create_app(
    settings: Settings,
    inspected: InspectedModel,
    metrics: Metrics,
    load: Callable[[], LoadedServer],
    on_failure: Callable[[Exception], None],
) -> FastAPI:
    """Make the application of one server.

    Args:
        settings: of the server.
        inspected: the model, its weights not loaded yet.
        metrics: of the server.
        load: loads the weights and starts the engine; called once, off the event loop, while `/ready` answers 503.
        on_failure: called on the event loop when `load` raises.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        server = app.state.server = Server(settings, inspected, metrics, Mailbox(loop))

        def load_in_background() -> None:
            try:
                report: Callable[[], None] = partial(server.set_loaded, load())
            except Exception as error:  # noqa: BLE001 - whatever it is, the server cannot serve
                report = partial(on_failure, error)
            with suppress(RuntimeError):  # a closed loop: the server was stopped meanwhile
                loop.call_soon_threadsafe(report)

        # A daemon, so that a server that is told to stop meanwhile does not wait for it.
        threading.Thread(target=load_in_background, name="load", daemon=True).start()
        yield
        if server.loaded is not None:
            await asyncio.to_thread(server.loaded.engine.stop)

    app = FastAPI(
        title="Ropewalk",
        summary="Inference for RoPE models; every request gets the positional scaling that its length needs.",
        lifespan=lifespan,
    )
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(BearerKey, key=settings.api_key.get_secret_value(), metrics=metrics)
    install_error_handlers(app, metrics)
    for router in (generating.router, models.router, health.router):
        app.include_router(router)
    return app
