"""Lengths as the command line says them."""

import random
from argparse import ArgumentTypeError
from collections import Counter

import pytest

from service.bench.lengths import parse_lengths


def drawn(text: str, number: int = 4000) -> Counter[int]:
    lengths, source = parse_lengths(text), random.Random(1)
    return Counter(lengths.draw(source) for _ in range(number))


@pytest.mark.parametrize(
    ("text", "possible"),
    [("128", {128}), ("3:5", {3, 4, 5}), ("7:7", {7}), ("1,10:12", {1, 10, 11, 12}), ("2=3,9=1", {2, 9})],
)
def test_every_length_of_a_distribution_comes_and_no_other(text: str, possible: set[int]) -> None:
    assert drawn(text).keys() == possible
    assert parse_lengths(text).least == min(possible)


def test_a_range_is_uniform() -> None:
    assert all(900 < count < 1100 for count in drawn("1:4").values())


def test_weights_are_shares() -> None:
    assert 2800 < drawn("2=3,9=1")[2] < 3200
    assert 2500 < drawn("2,5=0.5,9=0.0001")[2] < 2850


@pytest.mark.parametrize(
    "text", ["", "x", "1:", "1:x", ":5", "5:1", "0", "-3", "1,", "1=", "1=0", "1=-1", "1=inf", "1=x", "1.5"]
)
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        parse_lengths(text)
