"""A request as the HTTP side sees it: events to await, and a way to cancel. The one place where the engine's thread and
the event loop meet."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from service.core import Event, FinishEvent, SamplingParams, Sequence
from service.engine.thread import EngineThread
from service.scaling.policy import PlanChoice


class RequestHandle:
    """One admitted request. Made and used on one event loop."""

    def __init__(
        self, engine: EngineThread, request_id: str, prompt: list[int], choice: PlanChoice, sampling: SamplingParams
    ) -> None:
        """Admit a request.

        Raises:
            QueueFullError, NotReadyError: it was not admitted.
        """
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False
        self.sequence = Sequence(request_id, prompt, choice, sampling, deliver=self._deliver)
        engine.submit(self.sequence)

    async def events(self) -> AsyncIterator[Event]:
        """Events in order; the last, and only the last, is a FinishEvent."""
        while not self._ended:
            yield await self.next_event()

    async def next_event(self) -> Event:
        """Wait for the next event; call no more after a FinishEvent."""
        event = await self._events.get()
        self._ended = isinstance(event, FinishEvent)
        return event

    def cancel(self) -> None:
        """End the request unless its end has been seen already."""
        if not self._ended:
            self._engine.cancel(self.sequence)

    def _deliver(self, event: Event) -> None:
        # A closed loop has nobody left to tell: the server is going down.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
