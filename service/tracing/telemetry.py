"""One server's traces and measurements, over providers that are passed in."""

from collections.abc import Callable

from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.tracing import names
from service.tracing.hook import SCOPE_KEY
from service.tracing.instruments import Instruments
from service.tracing.journal import Journal
from service.tracing.request import RequestSpan

SCOPE_NAME = "ropewalk"


class Telemetry:
    """What makes the spans of one server.

    Attributes:
        journal: to be told by the engine what becomes of sequences.
    """

    def __init__(self, model: str, tracers: TracerProvider, meters: MeterProvider, stop: Callable[[], None]) -> None:
        """
        Args:
            model: the served model's name.
            tracers: where spans go.
            meters: where measurements go.
            stop: sends what is left.
        """
        self.journal = Journal()
        self._stop = stop
        self._model = model
        self._tracer = tracers.get_tracer(SCOPE_NAME)
        self._instruments = Instruments(meters.get_meter(SCOPE_NAME))

    def traced(self, app: ASGIApp) -> ASGIApp:
        """An application whose generating routes have a span for each request."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in names.OPERATIONS:
                span = RequestSpan(scope, self._model, self._tracer, self._instruments, self.journal)
                await _follow_answer(app, span, scope, receive, send)
            else:
                await app(scope, receive, send)

        return call

    def stop(self) -> None:
        """See `service.tracing.hook`."""
        self._stop()


async def _follow_answer(app: ASGIApp, span: RequestSpan, scope: Scope, receive: Receive, send: Send) -> None:
    status: int | None = None
    fault: str | None = None

    async def send_noting_status(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    try:
        await app({**scope, SCOPE_KEY: span}, receive, send_noting_status)
    except BaseException as error:
        fault = type(error).__name__
        raise
    finally:
        span.answered(status, fault)
