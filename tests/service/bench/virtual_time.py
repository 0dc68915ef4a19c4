"""An event loop whose time jumps to whatever comes next: sleeping takes none, and every run has the same times."""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")


class JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, lets the time pass at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for somebody else"
            self.now += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 seconds."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """As `asyncio.run`, without the waiting."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


def approximately(times: Mapping[str, float | None]) -> dict[str, float | None]:
    """Times to the microsecond."""
    return {name: None if time is None else round(time, 6) for name, time in times.items()}
