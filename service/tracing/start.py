"""The way in for a server that is told to trace: the one place that says what is missing where the extra is."""

from typing import TYPE_CHECKING

from service.errors import StartupError

if TYPE_CHECKING:
    from service.tracing.telemetry import Telemetry


def start(model: str) -> "Telemetry":
    """What traces a server, exporting as OpenTelemetry's variables say.

    Args:
        model: the served model's name.

    Raises:
        StartupError: the extra `otel` is not installed, or a variable asks for what it does not have.
    """
    try:
        from service.tracing.export import Export
        from service.tracing.telemetry import Telemetry
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise StartupError("otel needs the extra otel: pip install 'ropewalk[otel]'") from error
    export = Export()
    return Telemetry(model, export.tracers, export.meters, export.stop)
