"""Where an answer meets the trace of its request, if there is one.

Knows nothing of OpenTelemetry, which need not be installed.
"""

from typing import Protocol

from starlette.types import ASGIApp, Scope

from service.engine.handle import RequestHandle

SCOPE_KEY = "ropewalk.trace"


class Tracing(Protocol):
    """What traces a server."""

    def traced(self, app: ASGIApp, /) -> ASGIApp:
        """An application whose generating routes have a trace for each request."""

    def stop(self) -> None:
        """Called once no request is left; takes some seconds at most."""


class Untraced:
    """What traces nothing."""

    def traced(self, app: ASGIApp, /) -> ASGIApp:
        return app

    def stop(self) -> None:
        """There is nothing to stop."""


UNTRACED = Untraced()


class RequestTrace(Protocol):
    """The trace of one HTTP request."""

    def follow(self, handle: RequestHandle, *, choices_per_prompt: int) -> None:
        """Be told what the request has become, before any of its events is."""


def follow(scope: Scope, handle: RequestHandle, *, choices_per_prompt: int) -> None:
    """Have a request that was admitted become part of its trace.

    Args:
        scope: of its HTTP request.
        handle: the request; none of its events has been delivered yet.
        choices_per_prompt: how many of its choices follow one prompt.
    """
    trace: RequestTrace | None = scope.get(SCOPE_KEY)
    if trace is not None:
        trace.follow(handle, choices_per_prompt=choices_per_prompt)
