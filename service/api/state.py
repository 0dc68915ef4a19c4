"""What the routes share: one server's parts, whether it is ready and well, and the requests under way."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from service.build import InspectedModel, LoadedServer
from service.engine.handle import Mailbox, RequestHandle
from service.engine.thread import EngineThread
from service.errors import KeyBusyError, NotReadyError, QueueFullError, UnknownModelError
from service.metrics import Metrics
from service.settings import Settings

logger = logging.getLogger(__name__)

RECENT_SECONDS = 60.0
RECENT_ENDS = 256
LONGEST_RETRY_AFTER = 60  # seconds


class Traffic:
    """The admitted requests that have not ended, and how fast requests end. Used on the event loop alone."""

    def __init__(self, settings: Settings, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_queued_tokens = settings.max_queued_tokens
        self._max_per_key = settings.max_requests_per_key
        self._metrics = metrics
        self._clock = clock
        self._callers: dict[RequestHandle, bytes | None] = {}
        self._ends: deque[tuple[float, int]] = deque(maxlen=RECENT_ENDS)

    @property
    def is_idle(self) -> bool:
        return not self._callers

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of requests that have not started."""
        sequences = (sequence for handle in self._callers for sequence in handle.sequences)
        return sum(len(sequence.prompt) for sequence in sequences if sequence.scheduled_time is None)

    def ensure_room(self, engine: EngineThread, caller: bytes | None, choices: int = 1) -> None:
        """Refuse a request that is too much, before any work is spent on it.

        Args:
            engine: knows how many requests wait.
            caller: whose request it is; None where no key is asked for.
            choices: how many places in the queue it needs.

        Raises:
            QueueFullError, KeyBusyError: with the time after which there should be room.
        """
        try:
            engine.ensure_room(choices)
        except QueueFullError as error:
            error.retry_after = self._retry_after(sequences=choices)
            raise
        limit = self._max_queued_tokens
        if limit is not None and (waiting := self.num_queued_tokens) >= limit:
            full = QueueFullError(f"{waiting} prompt tokens are waiting; the limit is {limit}")
            full.retry_after = self._retry_after(prompt_tokens=waiting - limit + 1)
            raise full
        limit = self._max_per_key
        if limit is not None and (running := list(self._callers.values()).count(caller)) >= limit:
            busy = KeyBusyError(f"{running} requests with this key are under way; the limit is {limit}")
            busy.retry_after = self._retry_after(sequences=1)
            raise busy

    def add(self, handle: RequestHandle, caller: bytes | None) -> None:
        """Count a request until it ends."""
        self._callers[handle] = caller
        handle.when_ended(lambda: self._remove(handle))

    def _remove(self, handle: RequestHandle) -> None:
        del self._callers[handle]
        self._ends += [(self._clock(), len(sequence.prompt)) for sequence in handle.sequences]
        if handle.timeout is not None:
            self._metrics.refused.labels("deadline_exceeded").inc()

    def _retry_after(self, *, sequences: int = 0, prompt_tokens: int = 0) -> int:
        """Whole seconds in which so many sequences and prompt tokens should end, at the pace of the last minute."""
        now = self._clock()
        recent = [(at, tokens) for at, tokens in self._ends if now - at <= RECENT_SECONDS]
        if not recent:
            return 1
        elapsed = now - recent[0][0]
        ended_tokens = sum(tokens for _, tokens in recent)
        seconds = elapsed * max(sequences / len(recent), prompt_tokens / ended_tokens)
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY_AFTER)


@dataclass
class Server:
    """One server.

    Attributes:
        settings: as started.
        inspected: the model's name, config and policy.
        metrics: of this server.
        mailbox: carries events to the event loop that serves.
        traffic: the requests under way.
        loaded: the running engine; None until it is warm.
        is_draining: whether what runs may finish and nothing new is taken.
        started: Unix time, in seconds.
    """

    settings: Settings
    inspected: InspectedModel
    metrics: Metrics
    mailbox: Mailbox
    traffic: Traffic
    loaded: LoadedServer | None = None
    is_draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    _is_well: bool = field(default=True, init=False)

    def set_loaded(self, loaded: LoadedServer) -> None:
        """From here on requests are served."""
        self.loaded = loaded
        logger.info("ready")

    def require_loaded(self) -> LoadedServer:
        """The running engine.

        Raises:
            NotReadyError: the model is still loading, or the server is shutting down.
        """
        if self.is_draining:
            raise NotReadyError("the server is shutting down", code="shutting_down")
        if self.loaded is None:
            raise NotReadyError(f"the model {self.inspected.name} is still loading")
        return self.loaded

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.loaded is not None and not self.is_draining and self._trouble() is None

    def check_health(self) -> None:
        """See whether the engine works, and log when that has changed.

        Raises:
            NotReadyError: it does not, and the server should be started anew.
        """
        trouble = self._trouble()
        was_well, self._is_well = self._is_well, trouble is None
        if trouble is not None:
            if was_well:
                logger.error("unwell: %s", trouble)
            raise NotReadyError(trouble)
        if not was_well:
            logger.info("well again")

    def _trouble(self) -> str | None:
        if self.loaded is None or self.is_draining:
            return None
        engine, settings = self.loaded.engine, self.settings
        if not engine.is_alive:
            return "the engine has stopped"
        if (failures := engine.num_failures_in_a_row) >= settings.max_step_failures:
            return f"{failures} steps in a row have failed; the limit is {settings.max_step_failures}"
        if (seconds := engine.seconds_in_step) > settings.step_timeout_seconds:
            return f"a step has been running for {seconds:.0f} s; the limit is {settings.step_timeout_seconds:g} s"
        return None

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model than the one served."""
        if name not in (None, self.inspected.name):
            message = f"model {name!r} is not served here; the served model is {self.inspected.name!r}"
            raise UnknownModelError(message, param="model")


def get_server(request: Request) -> Server:
    """The server that the request came to."""
    server = request.app.state.server
    assert isinstance(server, Server)
    return server


ServerDep = Annotated[Server, Depends(get_server)]
