"""The engine's thread: a bounded way in, one end for everyone on the way out, whatever happens between.

Every wait has a limit, so that a broken promise fails instead of hanging; no test depends on how long anything takes.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from service.core import Event, FinishEvent, FinishReason, SamplingParams, Sequence
from service.engine.thread import EngineThread
from service.errors import NotReadyError, QueueFullError
from tests.fakes import PAGE_SIZE, EngineUnderTest, expected_output

LIMIT = 30.0  # seconds
PROMPT = [5, 9, 2]
ENDLESS = SamplingParams(max_tokens=50_000, temperature=0.0)


@dataclass
class Gate:
    """Holds the engine inside its first step until it is opened."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def before_step(self, _number: int, _step: Mapping[Sequence, int]) -> None:
        self.reached.set()
        assert self.opened.wait(LIMIT)


class Threaded:
    """An engine in its thread, and its requests' events as they come."""

    def __init__(self, max_queued: int = 8, gate: Gate | None = None, max_running: int = 2) -> None:
        self.gate = gate or Gate()
        if gate is None:
            self.gate.opened.set()
        num_pages = 4 * ENDLESS.max_tokens // PAGE_SIZE
        self.under_test = EngineUnderTest(num_pages, max_running, before_step=self.gate.before_step)
        self.thread = EngineThread(
            self.under_test.engine, self.under_test.metrics, max_running=max_running, max_queued=max_queued
        )
        self.ended: dict[str, threading.Event] = {}

    def sequence(self, name: str, sampling: SamplingParams | None = None) -> Sequence:
        sequence = self.under_test.sequence(name, PROMPT)
        sequence.sampling = sampling or sequence.sampling
        record, self.ended[name] = sequence.deliver, threading.Event()

        def deliver(event: Event) -> None:
            record(event)
            if isinstance(event, FinishEvent):
                self.ended[name].set()

        sequence.deliver = deliver
        return sequence

    def submit(self, name: str, sampling: SamplingParams | None = None) -> Sequence:
        sequence = self.sequence(name, sampling)
        self.thread.submit([sequence])
        return sequence

    def wait_for_end(self, name: str) -> FinishReason:
        assert self.ended[name].wait(LIMIT)
        return self.reason(name)

    def reason(self, name: str) -> FinishReason:
        """Why a request ended, which it must have done exactly once and last of all."""
        [end] = self.under_test.ends(name)
        assert self.under_test.events[name][-1] is end
        return end.reason


@contextmanager
def running(threaded: Threaded) -> Iterator[Threaded]:
    """Start the thread; in the end stop it, however the test went."""
    threaded.thread.start()
    try:
        yield threaded
    finally:
        threaded.gate.opened.set()
        threaded.thread.stop()
    assert not threaded.thread.is_alive
    threaded.under_test.pages.check()
    assert threaded.under_test.pages.num_used == 0


def test_requests_from_many_threads_all_get_their_own_text() -> None:
    with running(Threaded(max_queued=100)) as threaded:
        names = [str(number) for number in range(20)]
        clients = [threading.Thread(target=threaded.submit, args=(name,)) for name in names]
        for client in clients:
            client.start()
        for client in clients:
            client.join(LIMIT)
        for name in names:
            assert threaded.wait_for_end(name) == FinishReason.LENGTH
            assert threaded.under_test.token_ids(name) == expected_output(PROMPT, 8)


def test_a_full_queue_refuses_with_both_numbers_and_takes_requests_again_when_there_is_room() -> None:
    with running(Threaded(max_queued=2, gate=Gate(), max_running=1)) as threaded:
        threaded.submit("running")
        assert threaded.gate.reached.wait(LIMIT)
        assert threaded.thread.num_queued == 0
        threaded.submit("first")
        threaded.submit("second")
        assert threaded.thread.num_queued == 2
        for refused in (threaded.thread.ensure_room, lambda: threaded.submit("third")):
            with pytest.raises(QueueFullError, match=r"^2 requests are waiting; the limit is 2$"):
                refused()
        threaded.gate.opened.set()
        for name in ("running", "first", "second"):
            assert threaded.wait_for_end(name) == FinishReason.LENGTH
        threaded.submit("third, again")
        assert threaded.wait_for_end("third, again") == FinishReason.LENGTH
    assert threaded.under_test.events["third"] == []


def test_requests_that_wait_in_the_scheduler_count_as_queued() -> None:
    with running(Threaded(max_queued=1, gate=Gate(), max_running=1)) as threaded:
        threaded.submit("running", ENDLESS)
        assert threaded.gate.reached.wait(LIMIT)
        waiting = threaded.submit("waiting")
        in_next_step = Gate()
        threaded.under_test.runner.before_step = in_next_step.before_step
        threaded.gate.opened.set()
        assert in_next_step.reached.wait(LIMIT)  # the inbox has been emptied
        assert threaded.thread.num_queued == 1
        with pytest.raises(QueueFullError):
            threaded.submit("refused")
        threaded.thread.cancel(waiting)
        in_next_step.opened.set()
        assert threaded.wait_for_end("waiting") == FinishReason.CANCELLED
        assert threaded.thread.num_queued == 0


def test_before_it_is_started_and_after_it_was_stopped_it_takes_no_request() -> None:
    threaded = Threaded()
    with pytest.raises(NotReadyError):
        threaded.submit("too early")
    with running(threaded):
        threaded.submit("in time")
    with pytest.raises(NotReadyError):
        threaded.submit("too late")
    assert threaded.under_test.events["too early"] == threaded.under_test.events["too late"] == []


def test_a_thread_that_never_ran_can_be_stopped() -> None:
    threaded = Threaded()
    threaded.thread.stop()
    assert not threaded.thread.is_alive


def test_stopping_ends_every_request_exactly_once() -> None:
    with running(Threaded(gate=Gate(), max_running=2)) as threaded:
        threaded.submit("running", ENDLESS)
        assert threaded.gate.reached.wait(LIMIT)
        for name in ("started later", "waiting", "in the inbox"):
            threaded.submit(name, ENDLESS)
    for name in ("running", "started later", "waiting", "in the inbox"):
        assert threaded.reason(name) == FinishReason.CANCELLED


def test_stopping_twice_is_harmless() -> None:
    with running(Threaded()) as threaded:
        threaded.submit("a", ENDLESS)
        threaded.thread.stop()
        assert threaded.reason("a") == FinishReason.CANCELLED
    assert threaded.reason("a") == FinishReason.CANCELLED


def test_cancelling_ends_a_request_that_runs() -> None:
    with running(Threaded()) as threaded:
        endless = threaded.submit("endless", ENDLESS)
        assert threaded.gate.reached.wait(LIMIT)
        threaded.thread.cancel(endless)
        assert threaded.wait_for_end("endless") == FinishReason.CANCELLED


def test_cancelling_what_is_unknown_or_has_ended_is_harmless() -> None:
    with running(Threaded()) as threaded:
        threaded.thread.cancel(threaded.sequence("unknown"))
        ended = threaded.submit("ended")
        assert threaded.wait_for_end("ended") == FinishReason.LENGTH
        threaded.thread.cancel(ended)
        threaded.submit("next")
        assert threaded.wait_for_end("next") == FinishReason.LENGTH
        assert threaded.thread.is_alive
    threaded.thread.cancel(ended)
    assert threaded.reason("ended") == FinishReason.LENGTH
    assert threaded.under_test.events["unknown"] == []


def test_a_step_that_fails_does_not_stop_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Threaded(gate=Gate())) as threaded:

        def fail(_number: int, _step: Mapping[Sequence, int]) -> None:
            raise ArithmeticError("broken")

        with monkeypatch.context() as patched:
            patched.setattr(threaded.under_test.runner, "before_step", fail)
            threaded.submit("fails")
            assert threaded.wait_for_end("fails") == FinishReason.ERROR
        threaded.gate.opened.set()
        threaded.submit("next")
        assert threaded.wait_for_end("next") == FinishReason.LENGTH


def test_an_engine_that_breaks_ends_every_request_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Threaded(gate=Gate(), max_running=1)) as threaded:
        threaded.submit("running", ENDLESS)
        assert threaded.gate.reached.wait(LIMIT)

        def schedule() -> dict[Sequence, int]:
            threaded.submit("in the inbox", ENDLESS)
            raise ArithmeticError("broken")

        threaded.submit("waiting", ENDLESS)
        monkeypatch.setattr(threaded.under_test.scheduler, "schedule", schedule)
        threaded.gate.opened.set()
        for name in ("running", "waiting"):
            assert threaded.wait_for_end(name) == FinishReason.ERROR
        threaded.thread.stop()
        assert threaded.reason("in the inbox") == FinishReason.ERROR
        assert not threaded.thread.is_alive
        with pytest.raises(NotReadyError):
            threaded.submit("too late")


def test_it_tells_how_long_the_step_under_way_takes() -> None:
    threaded, now = Threaded(gate=Gate()), 5.0
    threaded.thread._clock = lambda: now
    with running(threaded):
        assert threaded.thread.seconds_in_step == 0
        threaded.submit("a")
        assert threaded.gate.reached.wait(LIMIT)
        now += 2.5
        assert threaded.thread.seconds_in_step == 2.5
        threaded.gate.opened.set()
        assert threaded.wait_for_end("a") == FinishReason.LENGTH
    now += 100
    assert threaded.thread.seconds_in_step == 0


def test_it_counts_failed_steps_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_number: int, _step: Mapping[Sequence, int]) -> None:
        raise ArithmeticError("broken")

    with running(Threaded()) as threaded:
        assert threaded.thread.num_failures_in_a_row == 0
        with monkeypatch.context() as patched:
            patched.setattr(threaded.under_test.runner, "before_step", fail)
            for number in range(1, 4):
                threaded.submit(str(number))
                assert threaded.wait_for_end(str(number)) == FinishReason.ERROR
                assert threaded.thread.num_failures_in_a_row == number
        threaded.submit("well")
        assert threaded.wait_for_end("well") == FinishReason.LENGTH
        assert threaded.thread.num_failures_in_a_row == 0
