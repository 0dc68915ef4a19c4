"""Calls written as JSON. Knows JSON and the field names that models use, not what stands around a call."""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from service.chat.functions import Functions
from service.chat.text_reader import TextReader, UnexpectedTextError, Waiting, peek, read_character

# Outside strings: white space, numbers, true, false, null, and what separates values.
PLAIN = re.compile(r"[\s0-9a-zA-Z+\-.,:]*")
STRING = re.compile(r'[^"\\\x00-\x1f]*')
CLOSING = {"{": "}", "[": "]"}
MEMBER = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')

ARGUMENTS = ("arguments", "parameters")
BESIDE = {"name", "type", "id"}  # what else a call without arguments may have


@dataclass(frozen=True)
class FoundCall:
    """A call as the model wrote it.

    Attributes:
        name: of one of the request's functions.
        arguments: the text of a JSON object.
    """

    name: str
    arguments: str


def read_object(reader: TextReader) -> Waiting[str]:
    """The text of a JSON object: as far as its last brace. Whether it is valid inside remains to be seen, but it goes
    wrong at the first character that no JSON can have, so that a marker behind broken JSON is not taken for a part.

    Raises:
        UnexpectedTextError: it is none.
    """
    start, closing = reader.at, list[str]()
    following = yield from peek(reader)
    if following != "{":
        raise UnexpectedTextError
    while True:
        yield from _skip(reader, PLAIN)
        character = yield from read_character(reader)
        if character == '"':
            yield from _read_string(reader)
        elif character in CLOSING:
            closing.append(CLOSING[character])
        elif character != closing.pop():
            reader.at -= 1
            raise UnexpectedTextError
        if not closing:
            return reader.text[start : reader.at]


def _read_string(reader: TextReader) -> Waiting[None]:
    while True:
        yield from _skip(reader, STRING)
        character = yield from read_character(reader)
        if character == '"':
            return
        if character != "\\":
            reader.at -= 1
            raise UnexpectedTextError
        yield from read_character(reader)


def _skip(reader: TextReader, pattern: re.Pattern[str]) -> Waiting[None]:
    while True:
        match = pattern.match(reader.text, reader.at)
        reader.at = reader.at if match is None else match.end()
        if reader.at < len(reader.text) or reader.ended:
            return
        yield None


def call_of(text: str, functions: Functions) -> FoundCall:
    """Read an object with a name and arguments.

    Raises:
        UnexpectedTextError: it is not JSON, not of this shape, or names none of the functions.
    """
    members = _members(text)
    name, _ = members.get("name", (None, ""))
    if not isinstance(name, str) or name not in functions:
        raise UnexpectedTextError
    written = [members[key][1] for key in ARGUMENTS if key in members]
    if not written and members.keys() <= BESIDE:
        written = ["{}"]
    if len(written) != 1:
        raise UnexpectedTextError
    return FoundCall(name, object_text(written[0]))


def object_text(text: str) -> str:
    """JSON text that is an object, or a string that holds one: the object's text, as it was written.

    Raises:
        UnexpectedTextError: it is neither.
    """
    value = parse(text)
    if isinstance(value, str):
        text, value = value, parse(value)
    if not isinstance(value, dict):
        raise UnexpectedTextError
    return text


def parse(text: str) -> Any:
    """A value from JSON.

    Raises:
        UnexpectedTextError: the text is not JSON (NaN and infinities are not, nor what no UTF-8 can carry).
    """
    try:
        text.encode()
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UnexpectedTextError from error


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """An object's members: values, and their texts. Of members of one name the last counts."""
    if not isinstance(parse(text), dict):
        raise UnexpectedTextError
    decoder, at = json.JSONDecoder(), 1
    members: dict[str, tuple[Any, str]] = {}
    while (match := MEMBER.match(text, at)) is not None:
        value, at = decoder.raw_decode(text, match.end())
        members[json.loads(match[1])] = (value, text[match.end() : at])
    return members


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
