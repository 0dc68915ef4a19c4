"""Where a stop string ends a text, however the text was cut."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.stop_strings import StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(deadline=None, max_examples=500)
@given(text=st.text("ab", max_size=12), stops=STOPS, cuts=st.lists(st.integers(0, 12), max_size=12))
def test_the_stop_string_that_is_complete_first_ends_the_text_however_the_text_is_cut(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    stop_end, kept = min(found, default=(len(text) + 1, len(text)))
    finder = StopStrings(stops)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    sent = ""
    for start, end in pairwise(borders):
        decided, stopped = finder.push(text[start:end])
        sent += decided
        assert stopped == (end >= stop_end)
        if stopped:
            break
        held = text[len(sent) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops), "held back for no reason"
    assert sent + finder.flush() == text[:kept]


def test_text_that_might_begin_a_stop_string_is_held_back_until_it_is_decided() -> None:
    finder = StopStrings(("###", "</s>"))
    assert finder.push("a#") == ("a", False)
    assert finder.push("#") == ("", False)
    assert finder.push("b<") == ("##b", False)
    assert finder.push("/s") == ("", False)
    assert finder.flush() == "</s"
    assert finder.flush() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    finder = StopStrings(())
    assert finder.push("anything") == ("anything", False)
    assert finder.flush() == ""
