"""A request of one or several choices on the event loop: what it is told, how it ends, and that it ends once."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from service.core import Event, FinishEvent, FinishReason, SamplingParams, Sequence, Timing, TokenEvent
from service.engine.handle import Choice, ChoiceEvent, Mailbox, RequestHandle
from service.engine.thread import EngineThread
from service.errors import QueueFullError
from service.scaling.policy import Policy
from tests.fakes import GEOMETRY

PLAN = Policy(GEOMETRY).choose(1, 1)


class Engine:
    """Notes what it is told; events are delivered by the test."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.is_full = is_full
        self.submitted: list[list[Sequence]] = []
        self.cancelled: list[tuple[str, FinishReason]] = []

    def submit(self, sequences: list[Sequence]) -> None:
        if self.is_full:
            raise QueueFullError("9 requests are waiting; the limit is 9")
        self.submitted.append(sequences)

    def cancel(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.cancelled.append((sequence.request_id, reason))


def new_handle(engine: Engine, choices: int = 3) -> RequestHandle:
    mailbox = Mailbox(asyncio.get_running_loop())
    made = [Choice([number], PLAN, SamplingParams(max_tokens=1, seed=number)) for number in range(choices)]
    return RequestHandle(cast(EngineThread, engine), mailbox, "id", made)


def finish(reason: FinishReason = FinishReason.STOP) -> FinishEvent:
    return FinishEvent(reason, "", Timing(0, 0, 0, 0, 0))


async def settled() -> None:
    """Let the loop take what was posted to it."""
    for _ in range(3):
        await asyncio.sleep(0)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize(("choices", "names"), [(1, ["id"]), (3, ["id-0", "id-1", "id-2"])])
def test_all_choices_are_submitted_at_once_under_names_of_their_own(choices: int, names: list[str]) -> None:
    async def test() -> None:
        engine = Engine()
        handle = new_handle(engine, choices)
        [together] = engine.submitted
        assert together == handle.sequences
        assert [sequence.request_id for sequence in together] == names
        assert [sequence.prompt for sequence in together] == [[number] for number in range(choices)]
        assert [sequence.sampling.seed for sequence in together] == [*range(choices)]

    run(test)


def test_what_is_refused_is_refused_whole() -> None:
    async def test() -> None:
        with pytest.raises(QueueFullError):
            new_handle(Engine(is_full=True))

    run(test)


def test_events_come_in_order_with_their_choice_until_the_last_has_ended() -> None:
    async def test() -> None:
        handle = new_handle(Engine())
        first, second, third = (sequence.deliver for sequence in handle.sequences)
        posted: list[tuple[int, Event]] = []

        def post(index: int, deliver: Callable[[Event], None], event: Event) -> None:
            posted.append((index, event))
            deliver(event)

        def engine_thread() -> None:
            post(2, third, TokenEvent(5, "a"))
            post(0, first, TokenEvent(6, "b"))
            post(0, first, finish())
            post(2, third, TokenEvent(7, "c"))
            post(2, third, finish(FinishReason.LENGTH))
            post(1, second, finish())

        await asyncio.to_thread(engine_thread)
        received = [event async for event in handle.events()]
        assert received == [ChoiceEvent(*event) for event in posted]

    run(test)


def test_cancelling_ends_those_that_live() -> None:
    async def test() -> None:
        engine = Engine()
        handle = new_handle(engine)
        handle.sequences[1].deliver(finish())
        await settled()
        handle.cancel()
        assert sorted(engine.cancelled) == [("id-0", FinishReason.CANCELLED), ("id-2", FinishReason.CANCELLED)]

    run(test)


def test_stopping_ends_one_unless_it_has_ended() -> None:
    async def test() -> None:
        engine = Engine()
        handle = new_handle(engine)
        handle.stop(2)
        assert engine.cancelled == [("id-2", FinishReason.STOP)]
        handle.sequences[1].deliver(finish())
        await settled()
        handle.stop(1)
        assert engine.cancelled == [("id-2", FinishReason.STOP)]

    run(test)


def test_who_waits_for_the_end_is_called_once_after_the_last_choice() -> None:
    async def test() -> None:
        handle, calls = new_handle(Engine()), []
        handle.when_ended(lambda: calls.append("first"))
        handle.when_ended(lambda: calls.append("second"))
        for number, sequence in enumerate(handle.sequences):
            assert calls == [], number
            sequence.deliver(finish())
            await settled()
        assert calls == ["first", "second"]

    run(test)


def test_a_deadline_cancels_every_choice_and_is_told_once_one_ends_by_it() -> None:
    async def test() -> None:
        engine, loop = Engine(), asyncio.get_running_loop()
        handle = new_handle(engine)
        handle.end_within(0.5, since=loop.time() - 1)
        while not engine.cancelled:
            await asyncio.sleep(0)
        assert [name for name, _ in sorted(engine.cancelled)] == ["id-0", "id-1", "id-2"]
        assert handle.timeout is None
        handle.sequences[0].deliver(finish())
        await settled()
        assert handle.timeout is None  # it made it at the last moment
        handle.sequences[1].deliver(finish(FinishReason.CANCELLED))
        await settled()
        assert handle.timeout == 0.5

    run(test)


def test_a_deadline_is_forgotten_when_all_have_ended() -> None:
    async def test() -> None:
        engine = Engine()
        handle = new_handle(engine)
        handle.end_within(0.001, since=asyncio.get_running_loop().time() + 0.001)
        for sequence in handle.sequences:
            sequence.deliver(finish())
        await settled()
        await asyncio.sleep(0.01)
        assert engine.cancelled == []
        assert handle.timeout is None

    run(test)


def test_waiting_for_an_event_ends_after_a_while() -> None:
    async def test() -> None:
        handle = new_handle(Engine())
        with pytest.raises(TimeoutError):
            await handle.next_event(timeout=0.001)
        handle.sequences[0].deliver(TokenEvent(5, "a"))
        assert await handle.next_event(timeout=60) == ChoiceEvent(0, TokenEvent(5, "a"))

    run(test)
