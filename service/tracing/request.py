"""The span of one request, with a child for each stage of each choice.

Prompts, outputs and what else a client writes into a field are no part of it: lengths, plans, codes and times are.
"""

import logging
import time
from collections.abc import Iterable

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from starlette.datastructures import Headers
from starlette.types import Scope

from service.engine.handle import RequestHandle
from service.errors import GenerationError
from service.tracing import names
from service.tracing.choice import EndedChoice
from service.tracing.instruments import Instruments
from service.tracing.journal import Journal
from service.tracing.outcome import Outcome

logger = logging.getLogger(__name__)


class RequestSpan:
    """Lasts from a request's arrival to the later of two: its answer is over, and the engine has ended all of its
    choices. A client that goes away leaves before the engine has heard of it. Used on the event loop alone."""

    def __init__(self, scope: Scope, model: str, tracer: Tracer, instruments: Instruments, journal: Journal) -> None:
        """
        Args:
            scope: of the HTTP request, to a route of `names.OPERATIONS`. Its headers name the caller's trace.
            model: the served model's name.
            tracer: makes the spans.
            instruments: record what is measured.
            journal: what the engine says of sequences.
        """
        self._tracer, self._instruments, self._journal = tracer, instruments, journal
        self._start = time.monotonic()
        self._epoch = time.time_ns() - time.monotonic_ns()
        operation = names.OPERATIONS[scope["path"]]
        self._labels = {
            names.OPERATION: operation,
            names.PROVIDER: names.OWN_PROVIDER,
            names.REQUEST_MODEL: model,
            names.RESPONSE_MODEL: model,
        }
        self._span = tracer.start_span(
            f"{operation} {model}",
            propagate.extract(Headers(scope=scope), Context()),
            SpanKind.SERVER,
            {**self._labels, names.HTTP_METHOD: scope["method"], names.HTTP_ROUTE: scope["path"]},
            start_time=self._nanoseconds(self._start),
        )
        self._parts_open = 1
        self._status: int | None = None
        self._fault: str | None = None
        self._handle: RequestHandle | None = None
        self._choices_per_prompt = 1

    def follow(self, handle: RequestHandle, *, choices_per_prompt: int) -> None:
        """See `service.tracing.hook`."""
        self._handle, self._choices_per_prompt = handle, choices_per_prompt
        self._parts_open += 1
        handle.when_ended(self._part_ended)

    def answered(self, status: int | None, fault: str | None) -> None:
        """The answer is over.

        Args:
            status: as it was sent; None if none was.
            fault: class of the exception that ended it.
        """
        self._status, self._fault = status, fault
        self._part_ended()

    def _part_ended(self) -> None:
        self._parts_open -= 1
        if self._parts_open == 0:
            try:
                self._end(time.monotonic())
            except Exception:  # the request itself is well
                logger.exception("a request could not be traced")

    def _end(self, end: float) -> None:
        outcome = self._outcome()
        error = self._error(outcome)
        if self._span.is_recording():
            self._describe(outcome, error)
        labels = self._labels if error is None else {**self._labels, names.ERROR_TYPE: error}
        self._instruments.record(end - self._start, outcome, labels)
        self._span.end(self._nanoseconds(end))  # last: who sees it finds the numbers too

    def _outcome(self) -> Outcome | None:
        handle = self._handle
        if handle is None:
            return None
        choices = [EndedChoice(sequence, self._journal.of(sequence)) for sequence in handle.sequences]
        return Outcome(handle.request_id, choices, self._choices_per_prompt, handle.timeout)

    def _error(self, outcome: Outcome | None) -> str | None:
        """What kept the request from a good end, one of few words."""
        if self._fault is not None:
            return self._fault
        if outcome is not None and outcome.error is not None:
            return outcome.error
        return str(self._status) if self._status is not None and self._status >= 400 else None

    def _describe(self, outcome: Outcome | None, error: str | None) -> None:
        if self._status is not None:
            self._span.set_attribute(names.HTTP_STATUS, self._status)
        if error is not None:
            self._span.set_attribute(names.ERROR_TYPE, error)
        is_servers_fault = self._status is None or self._status >= 500
        if self._fault is not None or error == GenerationError.code or (error is not None and is_servers_fault):
            self._span.set_status(Status(StatusCode.ERROR))
        if outcome is not None:
            self._span.set_attributes(outcome.attributes())
            self._add_stages(outcome.choices)

    def _add_stages(self, choices: Iterable[EndedChoice]) -> None:
        within = set_span_in_context(self._span, Context())
        for number, choice in enumerate(choices):
            for stage in choice.stages():
                span = self._tracer.start_span(
                    stage.name,
                    within,
                    attributes={names.CHOICE: number, **stage.attributes},
                    start_time=self._nanoseconds(stage.start),
                )
                span.end(self._nanoseconds(stage.end))

    def _nanoseconds(self, monotonic: float) -> int:
        """Unix time of a moment on the monotonic clock; all of a request's are told by one reading of both clocks."""
        return self._epoch + round(monotonic * 1e9)
