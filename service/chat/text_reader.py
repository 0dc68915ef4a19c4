"""Reading a text that arrives in pieces. Knows neither calls nor reasoning.

Readers are generators: where the text so far does not decide how it goes on they yield None, and are resumed once there
is more of it or it has ended. What they decide depends on the text alone, never on how it was cut.
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]

WHITE_SPACE = " \t\r\n"


class TextReader:
    """Text that has come and is not yet decided, and how far it has been read.

    Attributes:
        text: what is not yet taken.
        at: the place in it that is read next.
        ended: whether nothing more will come.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def take(self) -> str:
        """Everything that has been read since the last time; it is decided now."""
        taken, self.text, self.at = self.text[: self.at], self.text[self.at :], 0
        return taken


class UnexpectedTextError(Exception):
    """The text cannot go on as it does; the reader stands where it went wrong."""


def peek(reader: TextReader) -> Waiting[str]:
    """The next character, which is not read; empty at the end."""
    while reader.at == len(reader.text) and not reader.ended:
        yield None
    return reader.text[reader.at : reader.at + 1]


def read_character(reader: TextReader) -> Waiting[str]:
    """The next character.

    Raises:
        UnexpectedTextError: the text has ended.
    """
    character = yield from peek(reader)
    if not character:
        raise UnexpectedTextError
    reader.at += 1
    return character


def read_run(reader: TextReader, characters: str) -> Waiting[str]:
    """As many of some characters as follow."""
    start = reader.at
    while True:
        rest = reader.text[reader.at :]
        reader.at += len(rest) - len(rest.lstrip(characters))
        if reader.at < len(reader.text) or reader.ended:
            return reader.text[start : reader.at]
        yield None


def read_if(reader: TextReader, wanted: str) -> Waiting[bool]:
    """Whether the text goes on with a string; if so, it is read."""
    while True:
        if reader.text.startswith(wanted, reader.at):
            reader.at += len(wanted)
            return True
        if reader.ended or not wanted.startswith(reader.text[reader.at :]):
            return False
        yield None


def expect(reader: TextReader, wanted: str) -> Waiting[None]:
    """Read a string.

    Raises:
        UnexpectedTextError: something else follows.
    """
    found = yield from read_if(reader, wanted)
    if not found:
        raise UnexpectedTextError


def expect_or_end(reader: TextReader, wanted: str) -> Waiting[None]:
    """Read a string, or as much of it as there is before the text ends.

    Raises:
        UnexpectedTextError: something else follows.
    """
    found = yield from read_if(reader, wanted)
    if found:
        return
    rest = reader.text[reader.at :]
    if not wanted.startswith(rest):
        raise UnexpectedTextError
    reader.at = len(reader.text)


def overlap(text: str, wanted: str) -> int:
    """How many characters at the end of a text may begin a string that is not complete yet."""
    longest = min(len(wanted) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(wanted[:n])), 0)
