"""What is under way: when there is no room for more, and when there should be again."""

import asyncio
from typing import Any

import pytest

from service.api.state import Traffic
from service.core import FinishEvent, FinishReason, SamplingParams, Sequence, Timing
from service.engine.handle import Choice, Mailbox, RequestHandle
from service.errors import KeyBusyError, QueueFullError
from service.settings import Settings
from tests.fakes import EngineUnderTest


class Engine:
    """Admits everything and does nothing; its queue is full or it is not."""

    def __init__(self) -> None:
        self.admitted: list[Sequence] = []
        self.is_full = False

    def ensure_room(self, _: int) -> None:
        if self.is_full:
            raise QueueFullError("9 requests are waiting; the limit is 9")

    def submit(self, sequences: list[Sequence]) -> None:
        self.admitted += sequences

    def cancel(self, _: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        del reason


class Scene:
    """Traffic on a clock that stands still until it is moved."""

    def __init__(self, **settings: Any) -> None:
        self.now = 1000.0
        self.engine: Any = Engine()
        self.parts = EngineUnderTest()
        checked = Settings.model_validate({"api_key": "k"} | settings)
        self.traffic = Traffic(checked, self.parts.metrics, clock=lambda: self.now)

    def admit(self, tokens: int = 1, caller: bytes | None = None) -> RequestHandle:
        choice = self.parts.policy.choose(1, 1)
        mailbox = Mailbox(asyncio.new_event_loop())
        prompt = Choice([1] * tokens, choice, SamplingParams(max_tokens=1))
        handle = RequestHandle(self.engine, mailbox, "a", [prompt])
        mailbox._loop.close()
        self.traffic.add(handle, caller)
        return handle

    def end(self, handle: RequestHandle, after: float = 0.0) -> None:
        self.now += after
        handle._receive(0, FinishEvent(FinishReason.STOP, "", Timing(0, 0, 0, 0, 0)))

    def retry_after(self, caller: bytes | None = None) -> int | None:
        with pytest.raises((QueueFullError, KeyBusyError)) as refusal:
            self.traffic.ensure_room(self.engine, caller)
        return refusal.value.retry_after


def test_without_limits_there_is_always_room() -> None:
    scene = Scene()
    for _ in range(100):
        scene.traffic.ensure_room(scene.engine, b"a")
        scene.admit(1000, b"a")


def test_prompt_tokens_wait_until_their_request_starts() -> None:
    scene = Scene(max_queued_tokens=30)
    first = scene.admit(29)
    scene.traffic.ensure_room(scene.engine, None)
    second = scene.admit(200)
    assert scene.traffic.num_queued_tokens == 229
    with pytest.raises(QueueFullError, match=r"^229 prompt tokens are waiting; the limit is 30$"):
        scene.traffic.ensure_room(scene.engine, None)
    second.sequences[0].scheduled_time = 5.0
    assert scene.traffic.num_queued_tokens == 29
    scene.traffic.ensure_room(scene.engine, None)
    scene.admit(1)
    assert scene.retry_after() == 1
    scene.end(first)
    scene.traffic.ensure_room(scene.engine, None)


def test_each_key_has_its_own_requests() -> None:
    scene = Scene(max_requests_per_key=2)
    handles = [scene.admit(caller=b"a") for _ in range(2)]
    scene.traffic.ensure_room(scene.engine, b"b")
    scene.traffic.ensure_room(scene.engine, None)
    with pytest.raises(KeyBusyError, match=r"^2 requests with this key are under way; the limit is 2$"):
        scene.traffic.ensure_room(scene.engine, b"a")
    scene.end(handles[0])
    scene.traffic.ensure_room(scene.engine, b"a")


class TestRetryAfter:
    """From how fast requests end, whole seconds, at least 1 and at most 60."""

    def full(self, scene: Scene) -> int | None:
        scene.engine.is_full = True
        return scene.retry_after()

    def test_before_anything_has_ended_it_is_one_second(self) -> None:
        assert self.full(Scene()) == 1

    @pytest.mark.parametrize(("between", "expected"), [(0.001, 1), (1.0, 1), (7.0, 6), (12.0, 10), (59.0, 30)])
    def test_it_is_the_time_in_which_one_request_ends(self, between: float, expected: int) -> None:
        scene = Scene()
        handles = [scene.admit() for _ in range(5)]
        for handle in handles:
            scene.end(handle, between)
        assert self.full(scene) == expected

    def test_it_grows_while_nothing_ends_and_what_is_long_past_does_not_count(self) -> None:
        scene = Scene()
        scene.end(scene.admit())
        scene.now += 20.5
        assert self.full(scene) == 21
        scene.now += 39.5
        assert self.full(scene) == 60
        scene.now += 0.1
        assert self.full(scene) == 1

    def test_for_tokens_it_is_the_time_in_which_the_excess_ends(self) -> None:
        scene = Scene(max_queued_tokens=100)
        scene.end(scene.admit(10))
        scene.end(scene.admit(10), after=4.0)  # 5 tokens a second
        scene.admit(124)
        assert scene.retry_after() == 5
        scene.admit(10_000)
        assert scene.retry_after() == 60

    def test_for_a_key_too(self) -> None:
        scene = Scene(max_requests_per_key=1)
        scene.end(scene.admit())
        scene.end(scene.admit(caller=b"a"), after=6.0)
        scene.admit(caller=b"a")
        assert scene.retry_after(b"a") == 3


def test_a_request_that_has_ended_is_forgotten() -> None:
    scene = Scene()
    idle = [scene.traffic.is_idle]
    handle = scene.admit()
    idle.append(scene.traffic.is_idle)
    ended: list[str] = []
    handle.when_ended(lambda: ended.append("now"))
    scene.end(handle)
    assert [*idle, scene.traffic.is_idle] == [True, False, True]
    assert ended == ["now"]
