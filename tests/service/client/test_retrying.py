"""Which failures are tried again, and when. The clients' own loops are in `test_clients`."""

from email.utils import formatdate

import pytest

from service.client import ApiError, BrokenAnswerError, ClientError, Clock, UnreachableError
from service.client.retrying import Attempts, parse_retry_after
from tests.service.client.scripted import WALL, Time

CLOCK = Time().clock


def refusal(status: int = 429, retry_after: float | None = None) -> ApiError:
    return ApiError("busy", status=status, retry_after=retry_after)


@pytest.mark.parametrize("error", [refusal(429), refusal(503), UnreachableError("no")])
def test_what_may_pass_is_tried_again(error: ClientError) -> None:
    assert Attempts(1, 60, CLOCK).wait_after(error) > 0


@pytest.mark.parametrize(
    "error", [*(refusal(status) for status in (200, 400, 401, 404, 408, 413, 500, 502)), BrokenAnswerError("broke")]
)
def test_what_will_not_pass_is_not(error: ClientError) -> None:
    with pytest.raises(ClientError) as raised:
        Attempts(5, 60, CLOCK).wait_after(error)
    assert raised.value is error


@pytest.mark.parametrize(("chance", "share"), [(0.0, 0.5), (0.5, 0.75)])
def test_waits_double_up_to_a_bound_and_are_jittered(chance: float, share: float) -> None:
    attempts = Attempts(7, 1000, Clock(lambda: 0.0, lambda: 0.0, lambda: chance))
    waits = [attempts.wait_after(refusal()) for _ in range(7)]
    assert waits == [share * full for full in (0.5, 1, 2, 4, 8, 8, 8)]


def test_retry_after_is_kept_to_the_second_and_does_not_stop_the_doubling() -> None:
    attempts = Attempts(4, 1000, CLOCK)
    waits = [attempts.wait_after(refusal(retry_after=after)) for after in (7.0, 0.0, None)]
    assert waits == [7.0, 0.0, 0.75 * 2]


def test_the_count_is_a_bound() -> None:
    attempts = Attempts(2, 1000, CLOCK)
    attempts.wait_after(refusal())
    attempts.wait_after(refusal())
    with pytest.raises(ApiError):
        attempts.wait_after(refusal())


@pytest.mark.parametrize(("retry_after", "is_waited"), [(10.0, True), (10.5, False), (float("inf"), False)])
def test_no_try_begins_after_the_timeout(retry_after: float, is_waited: bool) -> None:
    attempts = Attempts(5, 10, CLOCK)
    if is_waited:
        assert attempts.wait_after(refusal(retry_after=retry_after)) == retry_after
    else:
        with pytest.raises(ApiError):
            attempts.wait_after(refusal(retry_after=retry_after))


def test_time_that_passed_counts() -> None:
    time = Time()
    attempts = Attempts(5, 10, time.clock)
    time.sleep(8)
    with pytest.raises(ApiError):
        attempts.wait_after(refusal(retry_after=3))


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        (None, None, None),
        ("0", None, 0),
        ("120", None, 120),
        ("9" * 400, None, float("inf")),
        ("-1", None, None),
        ("1.5", None, None),
        ("soon", None, None),
        ("²", None, None),
        ("", None, None),
        ("Tue, 14 Nov 2023 22:13:50 GMT", None, 30),
        ("Tue, 14 Nov 2023 22:13:50 -0000", None, 30),
        ("Tue, 14 Nov 2023 23:13:50 +0100", None, 30),
        ("Tue, 14 Nov 2023 22:13:10 GMT", None, 0),
        ("Tue, 99 Nov 2023 22:13:10 GMT", None, None),
        (formatdate(1000, usegmt=True), formatdate(990, usegmt=True), 10),
        (formatdate(WALL + 5, usegmt=True), "nonsense", 5),
    ],
)
def test_both_forms_of_retry_after(value: str | None, date: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, date, CLOCK) == seconds
