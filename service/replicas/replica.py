"""One replica: a whole server in a process of its own, called instead of asked over HTTP. Knows the application and
what is asked of it; Ray makes it and calls it, but is not known here."""

import asyncio
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry, disable_created_metrics
from starlette.types import Message

from service import build, logs, process
from service.api.state import Server
from service.app import create_app
from service.engine.thread import EngineThread
from service.metrics import Metrics
from service.replicas.asgi import CarriedRequest, answer
from service.replicas.placing import Beginning
from service.settings import Settings
from service.tracing.hook import UNTRACED
from service.tracing.start import start

SECONDS_BETWEEN_LOOKS = 0.05


class Replica:
    """Serves one model until its process ends. What begins with `record_` and `check_` Ray calls from time to time."""

    def __init__(self, settings: Settings) -> None:
        """Start to load; `wait_until_loaded` waits for the end of it.

        Raises:
            StartupError: the model cannot be served.
        """
        logs.configure(settings.log_level, settings.log_format)
        self._settings = settings
        inspected = build.inspect(settings)
        disable_created_metrics()
        telemetry = start(inspected.name) if settings.otel else None
        self._metrics = Metrics(CollectorRegistry(), None if telemetry is None else telemetry.journal)
        self._failure: Exception | None = None

        def load() -> build.LoadedServer:
            loaded = build.load(settings, inspected, self._metrics)
            process.settle()
            return loaded

        def fail(error: Exception) -> None:
            self._failure = error

        behind_front = settings.model_copy(update={"cors_origins": None})  # the front tells browsers what they may read
        self._app = create_app(behind_front, inspected, self._metrics, load, fail, telemetry or UNTRACED)
        self._lifespan = self._app.router.lifespan_context(self._app)

    async def wait_until_loaded(self) -> None:
        """Load the weights and start the engine.

        Raises:
            StartupError: it cannot be done.
        """
        await self._lifespan.__aenter__()
        while self._server.loaded is None:
            if self._failure is not None:
                raise self._failure
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    async def stop(self) -> None:
        """End what runs, and the engine."""
        await self._lifespan.__aexit__(None, None, None)

    async def answer(
        self, request: CarriedRequest, beginning: Beginning | None = None, only: str | None = None
    ) -> AsyncIterator[list[Message]]:
        """Answer a request.

        Args:
            request: as it came.
            beginning, only: for the router.

        Yields:
            First nothing, at once: the request has come to a living replica. Then what the application sends.
        """
        del beginning, only
        yield []
        async for batch in answer(self._app, request):
            yield batch

    def record_routing_stats(self) -> dict[str, int]:
        """What the router goes by."""
        return {"free_tokens": self._engine.free_tokens(self._server.inspected.policy.max_length)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas is decided by: requests that wait, and the share of the replica in use."""
        engine = self._engine
        running = engine.num_running / self._settings.max_running
        cache = engine.pages.num_used / engine.pages.num_pages
        return {"waiting": engine.num_queued, "in_use": max(running, cache)}

    def check_health(self) -> None:
        """Raise where the replica should be started anew, as /health says it."""
        self._server.check_health()

    @property
    def _engine(self) -> EngineThread:
        return self._server.require_loaded().engine

    @property
    def _server(self) -> Server:
        server: Server = self._app.state.server
        return server
