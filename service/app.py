"""The FastAPI application: routes, errors and the life of the engine behind them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from service.api import generating, health, models
from service.api.auth import BearerKey
from service.api.body_limit import BodyLimit
from service.api.errors import install_error_handlers
from service.api.state import Server
from service.build import InspectedModel, LoadedServer
from service.metrics import Metrics
from service.settings import Settings

logger = logging.getLogger(__name__)


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
    server = Server(settings, inspected, metrics)

    async def load_in_background() -> None:
        try:
            server.loaded = await asyncio.to_thread(load)
            logger.info("ready")
        except Exception as error:  # noqa: BLE001 - whatever it is, the server cannot serve
            on_failure(error)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(load_in_background())
        yield
        await loading
        if server.loaded is not None:
            await asyncio.to_thread(server.loaded.engine.stop)

    app = FastAPI(
        title="Ropewalk",
        summary="Inference for RoPE models; every request gets the positional scaling that its length needs.",
        lifespan=lifespan,
    )
    app.state.server = server
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(BearerKey, key=settings.api_key.get_secret_value())
    install_error_handlers(app, metrics)
    for router in (generating.router, models.router, health.router):
        app.include_router(router)
    return app
