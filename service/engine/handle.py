"""A request as the HTTP side sees it: events to await, and ways to end it. The one place where the engine's thread and
the event loop meet."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

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


class Choice(NamedTuple):
    """What one sequence of a request is made of."""

    prompt: list[int]
    plan: PlanChoice
    sampling: SamplingParams


class ChoiceEvent(NamedTuple):
    """An event, and which of the request's choices it is of."""

    choice: int
    event: Event


class RequestHandle:
    """One admitted request: one choice, or several that are generated side by side. Made and used on one event loop.

    Attributes:
        request_id: of the request.
        sequences: its choices, as the engine has them.
        timeout: after how many seconds its time was over; None if it was not.
    """

    def __init__(self, engine: EngineThread, mailbox: Mailbox, request_id: str, choices: list[Choice]) -> None:
        """Admit a request, all of its choices or none.

        Raises:
            QueueFullError, NotReadyError: it was not admitted.
        """
        self._engine = engine
        self._events: asyncio.Queue[ChoiceEvent] = asyncio.Queue()
        self._live = set(range(len(choices)))
        self._when_ended: list[Callable[[], None]] = []
        self._limit: float | None = None
        self.timeout: float | None = None
        self.request_id = request_id
        self.sequences = [
            Sequence(
                request_id if len(choices) == 1 else f"{request_id}-{index}",
                *choice,
                functools.partial(mailbox.post, functools.partial(self._receive, index)),
            )
            for index, choice in enumerate(choices)
        ]
        engine.submit(self.sequences)

    async def events(self) -> AsyncIterator[ChoiceEvent]:
        """Events in order; the last of each choice, and only that, is a FinishEvent."""
        for _ in self.sequences:
            event: Event | None = None
            while not isinstance(event, FinishEvent):
                index, event = await self.next_event()
                yield ChoiceEvent(index, event)

    async def next_event(self, timeout: float | None = None) -> ChoiceEvent:
        """Wait for the next event; call no more after the last choice's FinishEvent.

        Raises:
            TimeoutError: there was none for so many seconds.
        """
        async with asyncio.timeout(timeout):
            return await self._events.get()

    def cancel(self) -> None:
        """End those choices that have not ended already."""
        for index in self._live:
            self._engine.cancel(self.sequences[index])

    def stop(self, index: int) -> None:
        """End one choice, as a stop string would, unless it has ended already."""
        if index in self._live:
            self._engine.cancel(self.sequences[index], FinishReason.STOP)

    def end_within(self, seconds: float, *, since: float) -> None:
        """End the request if so many seconds do not suffice, on the event loop's clock."""
        timer = asyncio.get_running_loop().call_at(since + seconds, self._time_is_over, seconds)
        self.when_ended(timer.cancel)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have something called once all choices have ended, whether or not anybody waits for their events."""
        self._when_ended.append(call)

    def _time_is_over(self, seconds: float) -> None:
        self._limit = seconds
        self.cancel()

    def _receive(self, index: int, event: Event) -> None:
        if isinstance(event, FinishEvent):
            self._live.remove(index)
            if event.reason == FinishReason.CANCELLED:  # else it made it, or failed, at the last moment
                self.timeout = self._limit
            if not self._live:
                for call in self._when_ended:
                    call()
        self._events.put_nowait(ChoiceEvent(index, event))
