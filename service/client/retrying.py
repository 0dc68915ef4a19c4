"""Whether a call that failed is made again, and when. Sends nothing, sleeps never; its clock is given.

Tried again is what the server refused for now (429, 503) and what was never sent. A request that broke off is not: the
server may have done it. The wait is the answer's `Retry-After` where it has one, else it doubles each time, with
jitter, so that clients that failed together do not come again together.

Source: RFC 9110, section 10.2.3 (Retry-After).
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime

from service.client.errors import ApiError, ClientError, UnreachableError

RETRIED_STATUS = frozenset({429, 503})
FIRST_WAIT = 0.5  # seconds, before jitter
LONGEST_WAIT = 8.0


@dataclass(frozen=True)
class Clock:
    """Where times and chance come from.

    Attributes:
        now: seconds since any fixed moment, never going back.
        wall: seconds since 1970.
        random: uniform in [0, 1).
    """

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    random: Callable[[], float] = random.random


class Attempts:
    """The tries of one call."""

    def __init__(self, retries: int, timeout: float, clock: Clock) -> None:
        """
        Args:
            retries: tries after the first, at most.
            timeout: seconds from now after which none is begun.
            clock: tells the time.
        """
        self._left = retries
        self._end = clock.now() + timeout
        self._clock = clock
        self._wait = FIRST_WAIT

    def wait_after(self, error: ClientError) -> float:
        """Seconds to wait before the next try.

        Args:
            error: how the last one failed.

        Raises:
            ClientError: that error, when there is to be no further try. It is not waited in vain: a `Retry-After`
                beyond the end counts as the end.
        """
        if self._left == 0 or not _may_pass(error):
            raise error
        self._left -= 1
        wait = self._next_wait(error)
        if self._clock.now() + wait > self._end:
            raise error
        return wait

    def _next_wait(self, error: ClientError) -> float:
        doubled, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
        if isinstance(error, ApiError) and error.retry_after is not None:
            return error.retry_after
        return doubled * (0.5 + self._clock.random() / 2)


def _may_pass(error: ClientError) -> bool:
    if isinstance(error, ApiError):
        return error.status in RETRIED_STATUS
    return isinstance(error, UnreachableError)


def parse_retry_after(value: str | None, date: str | None, clock: Clock) -> float | None:
    """Seconds that a `Retry-After` header means, None where there is none or it cannot be read.

    Args:
        value: the header: seconds, or an HTTP date.
        date: the answer's `Date`, against which an HTTP date is taken, so that clocks may differ.
        clock: tells the time where the answer does not.
    """
    if value is None:
        return None
    if value.isascii() and value.strip().isdigit():
        return float(value)
    until = _parse_date(value)
    if until is None:
        return None
    sent = None if date is None else _parse_date(date)
    return max(0.0, until - (clock.wall() if sent is None else sent))


def _parse_date(value: str) -> float | None:
    try:
        moment = parsedate_to_datetime(value)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
