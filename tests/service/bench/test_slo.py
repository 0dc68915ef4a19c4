"""Limits as the command line says them, and who meets them."""

from argparse import ArgumentTypeError

import pytest

from service.bench.slo import Slo, parse_slo

TIMES = {"ttft": 2.0, "itl": 0.1, "e2e": 5.0, "longest_gap": 9.0}


def test_limits_are_read() -> None:
    assert parse_slo("ttft:2,itl:0.1") == Slo(ttft=2, itl=0.1)
    assert parse_slo("e2e:20") == Slo(e2e=20)
    assert str(parse_slo("e2e:20,ttft:0.5")) == "ttft ≤ 0.5 s, e2e ≤ 20 s"


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "foo:1", "ttft:1,"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        parse_slo(text)


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        (Slo(), True),
        (Slo(ttft=2, itl=0.1, e2e=5), True),
        (Slo(ttft=1.9), False),
        (Slo(ttft=3, itl=0.09), False),
        (Slo(e2e=4), False),
    ],
)
def test_all_limits_have_to_be_met(slo: Slo, is_met: bool) -> None:
    assert slo.is_met_by(TIMES) is is_met


def test_a_time_that_is_not_there_breaks_no_limit() -> None:
    assert Slo(itl=0.1).is_met_by(TIMES | {"itl": None})
