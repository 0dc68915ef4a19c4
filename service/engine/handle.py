"""A request as the HTTP side sees it: events to await, and a way to cancel. The one place where the engine's thread and
the event loop meet."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator

from service.core import Event, FinishEvent, SamplingParams, Sequence
from service.engine.thread import EngineThread
from service.scaling.policy import PlanChoice


class Mailbox:
    """Carries events from the engine's thread to one event loop, waking it once for all that came since."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[asyncio.Queue[Event], Event]] = deque()
        self._woken = False

    def post(self, queue: "asyncio.Queue[Event]", event: Event) -> None:
        """Called on the engine's thread."""
        self._waiting.append((queue, event))
        if not self._woken:
            self._woken = True
            # A closed loop has nobody left to tell: the server is going down.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # before reading: what is posted from here on wakes the loop again
        while self._waiting:
            queue, event = self._waiting.popleft()
            queue.put_nowait(event)


class RequestHandle:
    """One admitted request. Made and used on one event loop."""

    def __init__(
        self,
        engine: EngineThread,
        mailbox: Mailbox,
        request_id: str,
        prompt: list[int],
        choice: PlanChoice,
        sampling: SamplingParams,
    ) -> None:
        """Admit a request.

        Raises:
            QueueFullError, NotReadyError: it was not admitted.
        """
        self._engine = engine
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False
        deliver = functools.partial(mailbox.post, self._events)
        self.sequence = Sequence(request_id, prompt, choice, sampling, deliver)
        engine.submit(self.sequence)

    async def events(self) -> AsyncIterator[Event]:
        """Events in order; the last, and only the last, is a FinishEvent."""
        while not self._ended:
            yield await self.next_event()

    async def next_event(self, timeout: float | None = None) -> Event:
        """Wait for the next event; call no more after a FinishEvent.

        Raises:
            TimeoutError: there was none for so many seconds.
        """
        async with asyncio.timeout(timeout):
            event = await self._events.get()
        self._ended = isinstance(event, FinishEvent)
        return event

    def cancel(self) -> None:
        """End the request unless its end has been seen already."""
        if not self._ended:
            self._engine.cancel(self.sequence)
