"""A request as the HTTP side sees it: events to await, and ways to end it. The one place where the engine's thread and
the event loop meet."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable

from service.core import Event, FinishEvent, FinishReason, SamplingParams, Sequence
from service.engine.thread import EngineThread
from service.scaling.policy import PlanChoice


class Mailbox:
    """Carries events from the engine's thread to one event loop, waking it once for all that came since."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._woken = False

    def post(self, receive: Callable[[Event], None], event: Event) -> None:
        """Called on the engine's thread; `receive` is called on the event loop."""
        self._waiting.append((receive, event))
        if not self._woken:
            self._woken = True
            # A closed loop has nobody left to tell: the server is going down.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # before reading: what is posted from here on wakes the loop again
        while self._waiting:
            receive, event = self._waiting.popleft()
            receive(event)


class RequestHandle:
    """One admitted request. Made and used on one event loop.

    Attributes:
        sequence: the request, as the engine has it.
        timeout: after how many seconds its time was over; None if it was not.
    """

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
        self._has_ended = False
        self._when_ended: list[Callable[[], None]] = []
        self.timeout: float | None = None
        deliver = functools.partial(mailbox.post, self._receive)
        self.sequence = Sequence(request_id, prompt, choice, sampling, deliver)
        engine.submit(self.sequence)

    async def events(self) -> AsyncIterator[Event]:
        """Events in order; the last, and only the last, is a FinishEvent."""
        event: Event | None = None
        while not isinstance(event, FinishEvent):
            event = await self.next_event()
            yield event

    async def next_event(self, timeout: float | None = None) -> Event:
        """Wait for the next event; call no more after a FinishEvent.

        Raises:
            TimeoutError: there was none for so many seconds.
        """
        async with asyncio.timeout(timeout):
            return await self._events.get()

    def cancel(self) -> None:
        """End the request unless it has ended already."""
        if not self._has_ended:
            self._engine.cancel(self.sequence)

    def end_within(self, seconds: float, *, since: float) -> None:
        """End the request if so many seconds do not suffice, on the event loop's clock."""
        timer = asyncio.get_running_loop().call_at(since + seconds, self._time_is_over, seconds)
        self.when_ended(timer.cancel)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have something called once the request has ended, whether or not anybody waits for its events."""
        self._when_ended.append(call)

    def _time_is_over(self, seconds: float) -> None:
        self.timeout = seconds
        self.cancel()

    def _receive(self, event: Event) -> None:
        if isinstance(event, FinishEvent):
            self._has_ended = True
            if event.reason != FinishReason.CANCELLED:  # it made it, or failed, at the last moment
                self.timeout = None
            for call in self._when_ended:
                call()
        self._events.put_nowait(event)
