"""The engine's own thread, and the bounded way into it. Knows threads; does not know asyncio or HTTP."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from service.core import FinishReason, Sequence
from service.engine.engine import Engine
from service.errors import NotReadyError, QueueFullError

logger = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine. Every other thread talks to it through the methods here, which never block."""

    def __init__(self, engine: Engine, max_queued: int) -> None:
        """
        Args:
            engine: touched by this thread alone from `start` on.
            max_queued: at most so many requests wait to run.
        """
        self.max_queued = max_queued
        self._engine = engine
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._num_taken = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_queued(self) -> int:
        """Requests that have not started; for a moment one that is being taken in can count twice."""
        return self._num_submitted - self._num_taken + len(self._engine.scheduler.waiting)

    def ensure_room(self) -> None:
        """Raise QueueFullError when no request can be queued, so that no work is spent on one that will be refused."""
        if self.num_queued >= self.max_queued:
            raise QueueFullError(f"{self.num_queued} requests are waiting; the limit is {self.max_queued}")

    def submit(self, sequence: Sequence) -> None:
        """Admit a sequence; from here on it ends in exactly one FinishEvent.

        Raises:
            QueueFullError: too many wait already.
            NotReadyError: the engine is stopping or has died.
        """
        with self._lock:
            if self._stopping or not self.is_alive:
                raise NotReadyError("the server is shutting down")
            self.ensure_room()
            self._num_submitted += 1
            self._inbox.put(lambda: self._take(sequence))

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence; one that has ended already is left alone."""
        self._inbox.put(lambda: self._engine.cancel(sequence))

    def stop(self) -> None:
        """Cancel what is live and end the thread; returns when it has ended."""
        with self._lock:
            self._stopping = True
            self._inbox.put(lambda: None)
        if self._thread.ident is not None:
            self._thread.join()

    def _take(self, sequence: Sequence) -> None:
        self._engine.add(sequence)
        self._num_taken += 1

    def _run(self) -> None:
        reason = FinishReason.CANCELLED
        try:
            while not self._stopping:
                self._drain()
                if not self._engine.step():
                    self._inbox.get()()
        except Exception:
            logger.exception("the engine has stopped on an error of its own")
            reason = FinishReason.ERROR
        with self._lock:
            self._stopping = True
            self._drain()
        self._engine.end_all(reason)

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
