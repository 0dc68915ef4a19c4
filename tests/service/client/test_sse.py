"""Events come out whole, wherever their bytes are cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.client.sse import SseDecoder

# No line ends, in any character that Python's own line splitting would take for one as well.
VALUES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])
NOISE = st.sampled_from([": keep-alive", ":", "event: message", "id: 7", "retry: 100", "unknown: x", "novalue"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """The bytes of a stream, and the data of its events."""
    text, expected = draw(st.sampled_from(["", "\ufeff"])), []
    for _ in range(draw(st.integers(0, 4))):
        lines = draw(st.lists(VALUES, max_size=3))
        for line in lines:
            text += draw(st.sampled_from(["", draw(NOISE) + draw(ENDS)])) + "data: " + line + draw(ENDS)
        # A carriage return before a line feed would be one line end.
        text += "\n" if not text.endswith("\r") else "\r\n" if text.endswith("\r\n") else "\r"
        if lines:
            expected.append("\n".join(lines))
    return text.encode(), expected


def decode(data: bytes, cuts: list[int]) -> list[str]:
    decoder = SseDecoder()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [event for start, end in itertools.pairwise(edges) for event in decoder.feed(data[start:end])]


@given(streams(), st.lists(st.integers(0, 200), max_size=8))
def test_any_stream_cut_anywhere(stream: tuple[bytes, list[str]], cuts: list[int]) -> None:
    data, expected = stream
    assert decode(data, cuts) == expected


@given(streams())
def test_any_stream_byte_by_byte(stream: tuple[bytes, list[str]]) -> None:
    data, expected = stream
    assert decode(data, list(range(len(data)))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: a\n\n", ["a"]),
        ("data:a\n\n", ["a"]),
        ("data:  a\n\n", [" a"]),
        ("data\n\n", [""]),
        ("data\ndata\n\n", ["\n"]),
        ("data: a\ndata: b\n\n", ["a\nb"]),
        ("data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        ("data: a\r\rdata: b\r\r", ["a", "b"]),
        (": comment\n\n", []),
        (": data: a\n\n", []),
        ("event: x\nid: 1\n\n", []),
        ("data: a: b\n\n", ["a: b"]),
        ("Data: a\n\n", []),
        ("data: a\u2028b\n\n", ["a\u2028b"]),
        ("data: a\n\n\n\n", ["a"]),
        ("data: cut off\n", []),
        ("data: cut off", []),
        ("\ufeffdata: a\n\n", ["a"]),
        ("data: a\n\n\ufeffdata: b\n\n", ["a"]),
    ],
)
def test_the_rules_one_by_one(text: str, expected: list[str]) -> None:
    assert decode(text.encode(), []) == expected


def test_an_event_comes_out_with_its_last_byte_and_not_with_the_next() -> None:
    decoder = SseDecoder()
    assert list(decoder.feed(b"data: a\r\n\r")) == ["a"]
    assert list(decoder.feed(b"\ndata: b\n\n")) == ["b"]


def test_nothing_between_a_carriage_return_and_its_line_feed_changes_nothing() -> None:
    decoder = SseDecoder()
    assert [event for piece in (b"data: a\r", b"", b"\ndata: b\r\n\r\n") for event in decoder.feed(piece)] == ["a\nb"]


def test_bytes_that_are_no_text_do_not_end_the_stream() -> None:
    assert decode(b"data: \xff\n\ndata: b\n\n", []) == ["\ufffd", "b"]
