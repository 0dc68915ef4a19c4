"""Which names count as near, and how the one that is found is told."""

import pytest

from service.suggest import LONGEST, did_you_mean

KNOWN = ("a_b_c_d", "port", "max_running", "max_queued", "max_queued_tokens")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_runing", "max_running"),
        ("max-running", "max_running"),
        ("MAX_RUNNING", "max_running"),
        ("a-b-c-d", "a_b_c_d"),
        ("prot", "port"),
        ("max_queued_token", "max_queued_tokens"),
        ("max_queue", "max_queued"),
    ],
)
def test_a_slip_is_understood(name: str, meant: str) -> None:
    assert did_you_mean(name, KNOWN) == f": did you mean {meant}?"
    assert did_you_mean(name, KNOWN, prefix="rope.") == f": did you mean rope.{meant}?"


@pytest.mark.parametrize("name", ["", "x", "temperature", "model", "port" + "x" * LONGEST])
def test_nothing_is_said_of_a_name_that_is_like_no_other(name: str) -> None:
    assert did_you_mean(name, KNOWN) == ""


def test_a_name_as_long_as_a_body_costs_no_comparison() -> None:
    name = "x" * (LONGEST + 1)
    assert did_you_mean(name[:-1], [name[:-1]]) != ""
    assert did_you_mean(name, [name]) == ""


def test_without_known_names_nothing_is_said() -> None:
    assert did_you_mean("port", []) == ""
