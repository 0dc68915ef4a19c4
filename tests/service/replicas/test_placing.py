"""Which replica a request goes to, without Ray."""

import random
from collections import Counter

import pytest

from service.replicas.placing import BUSIER_BY, Beginning, Load, Placement

NATIVE, YARN = b"native", b"yarn"
FREE = 10_000


def loads(**ongoing: int) -> dict[str, Load]:
    return {name: Load(number, FREE) for name, number in ongoing.items()}


def pages(*letters: str) -> tuple[bytes, ...]:
    """Digests of a prompt's pages: each says all that came up to its end."""
    return tuple("".join(letters[: number + 1]).encode() for number in range(len(letters)))


def beginning(text: str, plan: bytes = NATIVE, *, any_plan: bool = False, long_tokens: int = 0) -> Beginning:
    """Of a prompt of one page for each letter."""
    return Beginning(pages(*text), plan, any_plan, long_tokens)


@pytest.fixture
def placement() -> Placement:
    return Placement(capacity=50, chance=random.Random(1))


def test_every_replica_is_named_once_the_best_first(placement: Placement) -> None:
    placement.note(beginning("ab"), "two")
    chosen = placement.choose(beginning("abc"), loads(one=0, two=3, three=1))
    assert chosen == ["two", "one", "three"]


def test_a_conversation_returns(placement: Placement) -> None:
    placement.note(beginning("ab"), "two")
    assert placement.choose(beginning("abcd"), loads(one=0, two=BUSIER_BY))[0] == "two"


def test_the_longest_part_counts(placement: Placement) -> None:
    placement.note(beginning("abc"), "two")
    placement.note(beginning("ab"), "one")
    assert placement.choose(beginning("abcd"), loads(one=0, two=1))[0] == "two"
    assert placement.choose(beginning("abxy"), loads(one=1, two=0))[0] == "one"


def test_what_was_computed_under_another_plan_does_not_count(placement: Placement) -> None:
    placement.note(beginning("ab", YARN), "two")
    assert placement.choose(beginning("abc"), loads(one=0, two=1))[0] == "one"
    assert placement.choose(beginning("abc", any_plan=True), loads(one=0, two=1))[0] == "two"


def test_plans_of_one_prompt_have_replicas_of_their_own(placement: Placement) -> None:
    placement.note(beginning("ab", YARN), "two")
    placement.note(beginning("ab", NATIVE), "one")
    assert placement.choose(beginning("abc", YARN), loads(one=0, two=1))[0] == "two"
    assert placement.choose(beginning("abc", NATIVE), loads(one=1, two=0))[0] == "one"


def test_a_shared_system_prompt_does_not_gather_all_in_one_place(placement: Placement) -> None:
    placement.note(beginning("sab"), "two")
    assert placement.choose(beginning("sxy"), loads(one=0, two=1))[0] == "one"


def test_a_long_document_that_is_asked_again_stays(placement: Placement) -> None:
    document = "d" * 40
    placement.note(beginning(document + "ab"), "two")
    assert placement.choose(beginning(document + "xy"), loads(one=0, two=3))[0] == "two"
    short = document[:10]
    placement.note(beginning("e" + short + "ab"), "two")
    assert placement.choose(beginning("e" + short + "xy"), loads(one=0, two=3))[0] == "one"


def test_a_holder_that_is_much_busier_or_full_is_left(placement: Placement) -> None:
    placement.note(beginning("ab"), "two")
    assert placement.choose(beginning("abc"), loads(one=0, two=BUSIER_BY + 1))[0] == "one"
    assert placement.choose(beginning("abc"), loads(one=49, two=50))[0] == "one"


def test_a_replica_that_is_gone_holds_nothing(placement: Placement) -> None:
    placement.note(beginning("abc"), "two")
    assert placement.choose(beginning("abcd"), loads(one=3, three=3))[0] in {"one", "three"}


def test_long_plans_go_where_there_is_room(placement: Placement) -> None:
    long = beginning("xy", YARN, long_tokens=4000)
    there_are = {"one": Load(0, 9_000), "two": Load(5, 10_000)}
    # What was sent there counts until the replica says anew how much is free.
    assert [placement.choose(long, there_are)[0] for _ in range(5)] == ["two", "one", "two", "one", "two"]
    assert placement.choose(long, {**there_are, "two": Load(5, 9_999)})[0] == "two"


def test_a_short_plan_does_not_look_for_room(placement: Placement) -> None:
    assert placement.choose(beginning("xy"), {"one": Load(0, 100), "two": Load(1, 10_000)})[0] == "one"


def test_a_cached_beginning_is_worth_more_than_room(placement: Placement) -> None:
    placement.note(beginning("ab", YARN), "one")
    long = beginning("abc", YARN, long_tokens=4000)
    assert placement.choose(long, {"one": Load(1, 5_000), "two": Load(0, 10_000)})[0] == "one"


def test_of_two_at_random_the_less_busy_one(placement: Placement) -> None:
    there_are = loads(a=0, b=1, c=2, d=3)
    chosen = Counter(placement.choose(None, there_are)[0] for _ in range(6000))
    # Of six pairs a is the better of three, b of two, c of one, d of none.
    assert chosen["d"] == 0
    for name, expected in (("a", 3000), ("b", 2000), ("c", 1000)):
        assert chosen[name] == pytest.approx(expected, rel=0.1)


def test_equals_share(placement: Placement) -> None:
    chosen = Counter(placement.choose(None, loads(one=2, two=2))[0] for _ in range(1000))
    assert min(chosen["one"], chosen["two"]) > 400


def test_a_full_replica_is_not_chosen_while_another_has_room(placement: Placement) -> None:
    there_are = loads(a=50, b=50, c=50, d=49)
    assert {placement.choose(None, there_are)[0] for _ in range(50)} == {"d"}


def test_later_pages_are_forgotten_before_earlier_ones() -> None:
    placement = Placement(50, most_known_pages=20, chance=random.Random(1))
    placement.note(beginning("d" * 40), "two")
    assert placement.num_known_pages == 20
    assert placement.choose(beginning("d" * 20), loads(one=0, two=1))[0] == "two"


def test_what_was_asked_for_longest_ago_is_forgotten() -> None:
    placement = Placement(50, most_known_pages=4, chance=random.Random(1))
    for text in ("ab", "xy", "ab", "pq"):
        placement.note(beginning(text), "two")
    there_are = loads(one=0, two=1)
    chosen = {text: placement.choose(beginning(text + "z"), there_are)[0] for text in ("ab", "xy", "pq")}
    assert chosen == {"ab": "two", "xy": "one", "pq": "two"}


def test_the_end_of_a_prompt_stays_one_when_longer_ones_follow(placement: Placement) -> None:
    placement.note(beginning("ab"), "two")
    placement.note(beginning("abcd"), "two")
    assert placement.choose(beginning("abxyz"), loads(one=0, two=1))[0] == "two"


def test_without_full_pages_nothing_is_known(placement: Placement) -> None:
    nothing = Beginning((), NATIVE)
    placement.note(nothing, "two")
    assert placement.choose(nothing, loads(one=0, two=1))[0] == "one"
