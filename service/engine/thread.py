"""The engine's own thread, and the bounded way into it. Knows threads; does not know asyncio or HTTP."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from service.cache.pages import PageAllocator
from service.core import FinishReason, Sequence
from service.engine.engine import Engine
from service.errors import NotReadyError, QueueFullError
from service.metrics import Metrics

logger = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine. Every other thread talks to it through the methods here, which never block."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        *,
        max_running: int,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            engine: touched by this thread alone from `start` on.
            metrics: told how many wait, and how long the step under way takes.
            max_running: requests that the engine runs at a time.
            max_queued: at most so many more are admitted.
            clock: seconds that only ever rise.
        """
        self._clock = clock
        self._step_began: float | None = None
        self._max_queued = max_queued
        self._max_running = max_running
        self._engine = engine
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._num_taken = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.waiting.set_function(lambda: self.num_queued)
        metrics.step_under_way.set_function(lambda: self.seconds_in_step)

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Run something in this thread, before the next step, and wait for it. What it raises is raised here."""
        done: Future[None] = Future()

        def attempt() -> None:
            try:
                work()
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - it is raised where it can be handled
                done.set_exception(error)

        self._inbox.put(attempt)
        done.result()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def seconds_in_step(self) -> float:
        """For how long the step under way has been running, 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    @property
    def num_failures_in_a_row(self) -> int:
        """Steps that have failed since the last that did not."""
        return self._engine.num_failures_in_a_row

    @property
    def pages(self) -> PageAllocator:
        """The cache's pages; other threads may count them."""
        return self._engine.scheduler.pages

    def free_tokens(self, length: int) -> int:
        """Tokens that the cache has room for, in sequences of a length."""
        scheduler = self._engine.scheduler
        return scheduler.needs.tokens(scheduler.pages.num_free, length)

    @property
    def num_running(self) -> int:
        """Requests in the running batch."""
        return len(self._engine.scheduler.running)

    @property
    def num_queued(self) -> int:
        """Requests that have not started; for a moment one that is being taken in can count twice."""
        return self._num_submitted - self._num_taken + len(self._engine.scheduler.waiting)

    def ensure_room(self, sequences: int = 1) -> None:
        """Raise QueueFullError when so many sequences cannot be queued, so that no work is spent on what will be
        refused."""
        # Those that arrived during a step and will start with the next one do not wait for anybody.
        about_to_start = max(0, self._max_running - len(self._engine.scheduler.running))
        waiting = max(0, self.num_queued - about_to_start)
        if self.num_queued + sequences - about_to_start > self._max_queued:
            more = "" if sequences == 1 else f" and {sequences} more would"
            raise QueueFullError(f"{waiting} requests are waiting{more}; the limit is {self._max_queued}")

    def submit(self, sequences: list[Sequence]) -> None:
        """Admit sequences, all or none; from here on each ends in exactly one FinishEvent.

        Raises:
            QueueFullError: too many wait already.
            NotReadyError: the engine is stopping or has died.
        """
        with self._lock:
            if self._stopping or not self.is_alive:
                raise NotReadyError("the engine has stopped")
            self.ensure_room(len(sequences))
            self._num_submitted += len(sequences)
            self._inbox.put(lambda: self._take(sequences))

    def cancel(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence; one that has ended already is left alone."""
        self._inbox.put(lambda: self._engine.cancel(sequence, reason))

    def stop(self) -> None:
        """Cancel what is live and end the thread; returns when it has ended."""
        with self._lock:
            self._stopping = True
            self._inbox.put(lambda: None)
        if self._thread.ident is not None:
            self._thread.join()

    def _take(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._engine.add(sequence)
            self._num_taken += 1

    def _run(self) -> None:
        reason = FinishReason.CANCELLED
        try:
            while not self._stopping:
                self._drain()
                if not self._step():
                    self._inbox.get()()
        except Exception:
            logger.exception("the engine has stopped on an error of its own")
            reason = FinishReason.ERROR
        with self._lock:
            self._stopping = True
        self._end(reason)

    def _step(self) -> bool:
        self._step_began = self._clock()
        try:
            return self._engine.step()
        finally:
            self._step_began = None

    def _end(self, reason: FinishReason) -> None:
        """End every request: those that are live, and those that were admitted and not yet taken in."""
        try:
            self._drain()
        finally:
            self._engine.end_all(reason)

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
