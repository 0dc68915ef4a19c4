"""How many replicas there should be."""

from types import SimpleNamespace

import pytest

from service.replicas.scaling import replicas_wanted, wanted_of


@pytest.mark.parametrize(
    ("in_use", "waiting", "wanted"),
    [
        (0.0, 0, 0),
        (0.7, 0, 1),
        (1.4, 0, 2),
        (1.5, 0, 3),
        (2.0, 4, 4),  # two full replicas and four that wait
        (0.1, 9, 3),
    ],
)
def test_use_and_what_waits_are_added(in_use: float, waiting: float, wanted: int) -> None:
    assert wanted_of(in_use, waiting) == wanted


def context(current: int, **said: dict[str, float]) -> SimpleNamespace:
    return SimpleNamespace(aggregated_metrics=said, target_num_replicas=current)


def test_what_all_replicas_say_counts() -> None:
    assert replicas_wanted(context(2, in_use={"a": 1.0, "b": 1.0}, waiting={"a": 0, "b": 4})) == (4, {})


def test_one_stays() -> None:
    assert replicas_wanted(context(2, in_use={"a": 0.0, "b": 0.0}, waiting={"a": 0, "b": 0})) == (1, {})


def test_nothing_changes_before_anybody_has_said_anything() -> None:
    assert replicas_wanted(context(3)) == (3, {})
    assert replicas_wanted(SimpleNamespace(aggregated_metrics=None, target_num_replicas=3)) == (3, {})
