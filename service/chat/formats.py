"""The ways in which models write tool calls: how each is told from a template, read, and written where it is forced.

Knows the conventions of the model families. Does not know where the text comes from.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

from service.chat.functions import Functions
from service.chat.json_calls import FoundCall, call_of, object_text, read_object
from service.chat.text_reader import (
    WHITE_SPACE,
    TextReader,
    UnexpectedTextError,
    expect,
    expect_or_end,
    overlap,
    peek,
    read_if,
    read_run,
)
from service.chat.xml_calls import xml_call_of

Calls = Generator[FoundCall | None, None, None]
"""A reader that yields calls, and None where it waits for more text. It raises UnexpectedTextError where the text is no
call after all."""

NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-."


@dataclass(frozen=True)
class CallFrame:
    """What stands around the name and the JSON arguments of calls that are written as the model was trained to.

    A text is `opening`, calls with `separator` between them, and `closing`; a call is `before_name`, name,
    `before_arguments`, arguments, `after_arguments`.
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str
    opening: str = ""
    closing: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls.

    Attributes:
        name: the format's.
        openings: strings with which a call begins, wherever they stand.
        bare: whether a text that begins with `{` may be a call too.
        in_template: what a template's text contains if the model writes calls so.
        not_in_template: what it then does not contain.
        read: reads calls from a text, which stands at one of the openings.
        markers: strings of the format that can be special tokens.
        frame: what is written where a call is forced, None where the format cannot be forced.
        short_ids: whether templates of these models want call ids of nine letters and digits.
    """

    name: str
    openings: tuple[str, ...]
    in_template: tuple[str, ...]
    read: Callable[[TextReader, Functions], Calls]
    markers: tuple[str, ...]
    frame: CallFrame | None
    bare: bool = False
    not_in_template: tuple[str, ...] = ()
    short_ids: bool = False


def read_hermes(reader: TextReader, functions: Functions) -> Calls:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`. The end may be missing at the end of the text."""
    yield from expect(reader, "<tool_call>")
    yield from read_run(reader, WHITE_SPACE)
    text = yield from read_object(reader)
    yield from read_run(reader, WHITE_SPACE)
    yield from expect_or_end(reader, "</tool_call>")
    yield call_of(text, functions)


def read_llama(reader: TextReader, functions: Functions) -> Calls:
    """`{"name": …, "parameters": {…}}`, `<|python_tag|>` before it or not, and `;` between several."""
    while True:
        yield from read_if(reader, "<|python_tag|>")
        yield from read_run(reader, WHITE_SPACE)
        text = yield from read_object(reader)
        yield call_of(text, functions)
        yield from read_run(reader, WHITE_SPACE)
        more = yield from read_if(reader, ";")
        if not more:
            return
        yield from read_run(reader, WHITE_SPACE)
        following = yield from peek(reader)
        if following not in ("{", "<"):
            if following:
                reader.at = 0  # the `;` belongs to a text
            return


def read_mistral(reader: TextReader, functions: Functions) -> Calls:
    """`[TOOL_CALLS]`, then a JSON array of calls; or a name, `[CALL_ID]` and an id (in some versions), `[ARGS]` (which
    can be swallowed), and JSON arguments."""
    yield from expect(reader, "[TOOL_CALLS]")
    yield from read_run(reader, WHITE_SPACE)
    if (yield from peek(reader)) == "[":
        yield from _read_array(reader, functions)
        return
    name = yield from read_run(reader, NAME_CHARACTERS)
    if (yield from read_if(reader, "[CALL_ID]")):
        yield from read_run(reader, NAME_CHARACTERS)
    yield from read_if(reader, "[ARGS]")
    yield from read_run(reader, WHITE_SPACE)
    text = yield from read_object(reader)
    if name not in functions:
        raise UnexpectedTextError
    yield FoundCall(name, object_text(text))


def _read_array(reader: TextReader, functions: Functions) -> Calls:
    yield from expect(reader, "[")
    while True:
        yield from read_run(reader, WHITE_SPACE)
        text = yield from read_object(reader)
        yield call_of(text, functions)
        yield from read_run(reader, WHITE_SPACE)
        more = yield from read_if(reader, ",")
        if not more:
            yield from expect_or_end(reader, "]")
            return


def read_qwen_xml(reader: TextReader, functions: Functions) -> Calls:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`. The end may be missing at
    the end of the text."""
    yield from expect(reader, "<tool_call>")
    yield from read_run(reader, WHITE_SPACE)
    start = reader.at
    yield from expect(reader, "<function=")
    end, function_end = "</tool_call>", "</function>"
    while True:
        found = reader.text.find(end, reader.at)
        if found >= 0:
            reader.at = found + len(end)
            text = reader.text[start:found].rstrip(WHITE_SPACE)
            if text.endswith(function_end):
                break
        elif reader.ended:
            text = reader.text[start : len(reader.text) - overlap(reader.text, end)].rstrip(WHITE_SPACE)
            reader.at = len(reader.text)
            if text.endswith(function_end):
                break
            raise UnexpectedTextError
        else:
            reader.at = max(reader.at, len(reader.text) - len(end) + 1)
            yield None
    yield xml_call_of(text, functions)


FORMATS = {
    each.name: each
    for each in (
        ToolFormat(
            name="qwen-xml",
            openings=("<tool_call>",),
            in_template=("<tool_call>", "<function=", "<parameter="),
            read=read_qwen_xml,
            markers=("<tool_call>", "</tool_call>"),
            frame=None,
        ),
        ToolFormat(
            name="hermes",
            openings=("<tool_call>",),
            in_template=("<tool_call>", "</tool_call>"),
            not_in_template=("<function=", "<arg_key>", "<tool_calls>"),
            read=read_hermes,
            markers=("<tool_call>", "</tool_call>"),
            frame=CallFrame('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"),
        ),
        ToolFormat(
            name="mistral",
            openings=("[TOOL_CALLS]",),
            in_template=("[TOOL_CALLS]",),
            not_in_template=("[ARGS]",),
            read=read_mistral,
            markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
            frame=CallFrame('{"name": "', '", "arguments": ', "}", ", ", opening="[TOOL_CALLS] [", closing="]"),
            short_ids=True,
        ),
        ToolFormat(
            name="mistral-named",
            openings=("[TOOL_CALLS]",),
            in_template=("[TOOL_CALLS]", "[ARGS]"),
            read=read_mistral,
            markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
            frame=CallFrame("[TOOL_CALLS]", "[ARGS]", "", separator=""),
            short_ids=True,
        ),
        ToolFormat(
            name="llama",
            openings=("<|python_tag|>",),
            bare=True,
            in_template=("ipython", '"parameters":'),
            not_in_template=("<tool_call>", "[TOOL_CALLS]"),
            read=read_llama,
            markers=("<|python_tag|>",),
            frame=CallFrame('{"name": "', '", "parameters": ', "}", separator="; "),
        ),
    )
}
"""Every format by its name."""


def format_of(template: str) -> ToolFormat | None:
    """The format that a template's text shows, None if it is none of these."""
    text = template.replace('\\"', '"')  # as it is inside the template's own strings
    return next(
        (
            each
            for each in FORMATS.values()
            if all(part in text for part in each.in_template) and not any(part in text for part in each.not_in_template)
        ),
        None,
    )
