"""Generated texts come apart into content, reasoning and calls, however they are cut, and nothing is lost."""

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.chat.formats import FORMATS
from service.chat.functions import Functions
from service.chat.reasoning import REASONING, ReasoningMarkers
from service.chat.splitter import Content, Part, Reasoning, Splitter, ToolCall, Tools, new_call_id

THINK, BRACKETS = REASONING
FUNCTIONS: Functions = {
    "add": {
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["number", "null"]},
            "note": {"type": "string"},
            "either": {"type": ["string", "integer"]},
            "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
    "wait": {},
}
WEATHER = '{"city": "Rome"}'


def split(pieces: list[str], splitter: Splitter) -> list[Part]:
    """What comes out in all, neighbouring pieces of one kind put together."""
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.end()
    merged: list[Part] = []
    for part in parts:
        if isinstance(part, ToolCall):
            merged.append(part)
            continue
        assert part.text, "an empty piece"
        if merged and type(merged[-1]) is type(part):
            last = merged.pop()
            assert not isinstance(last, ToolCall)
            merged.append(type(part)(last.text + part.text))
        else:
            merged.append(part)
    return merged


def splitter_for(
    name: str | None, *, reasoning: ReasoningMarkers | None = None, inside: bool = False, first_only: bool = False
) -> Splitter:
    numbers = itertools.count()
    tools = None if name is None else Tools(FORMATS[name], FUNCTIONS, first_call_only=first_only)
    return Splitter(tools=tools, reasoning=reasoning, inside_reasoning=inside, new_id=lambda: f"call_{next(numbers)}")


def whole(name: str | None, text: str, **options: Any) -> list[Part]:
    """What comes out of a text, whether it comes at once or character by character."""
    at_once = split([text], splitter_for(name, **options))
    assert split(list(text), splitter_for(name, **options)) == at_once
    return at_once


def calls(*named: tuple[str, str]) -> list[Part]:
    return [ToolCall(index, f"call_{index}", name, arguments) for index, (name, arguments) in enumerate(named)]


ADD = ("add", '{"a": 1}')

# Texts of each format as its models write them, and the calls in them.
CONVENTIONS = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ADD]),
    ("hermes", '<tool_call>{ "arguments": {"a": 1}, "name": "add"}</tool_call> ', [ADD]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n', [ADD]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_', [ADD]),
    ("hermes", '<tool_call>\n{"name": "wait"}\n</tool_call>', [("wait", "{}")]),
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n'
        '{"name": "wait", "arguments": {}}\n</tool_call>',
        [ADD, ("wait", "{}")],
    ),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', [ADD]),
    ("llama", '\n\n<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD]),
    ("llama", '{"type": "function", "name": "add", "parameters": {"a": 1}}', [ADD]),
    (
        "llama",
        '{"name": "add", "parameters": {"a": 1}}; {"name": "wait", "parameters": {}};<|python_tag|>{"name": "wait"}',
        [ADD, ("wait", "{}"), ("wait", "{}")],
    ),
    ("llama", '{"name": "add", "parameters": {"a": 1}};', [ADD]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', [ADD]),
    ("mistral", '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "add", "id": "abcdefghi"}', [ADD]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "wait", "arguments": {}}]',
        [ADD, ("wait", "{}")],
    ),
    ("mistral-named", '[TOOL_CALLS]add[ARGS]{"a": 1}', [ADD]),
    ("mistral-named", '[TOOL_CALLS]add{"a": 1}', [ADD]),
    ("mistral-named", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]wait[ARGS]{}', [ADD, ("wait", "{}")]),
    (
        "qwen-xml",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        [ADD],
    ),
    ("qwen-xml", "<tool_call>\n<function=wait>\n</function>\n</tool_call>\n", [("wait", "{}")]),
    ("qwen-xml", "<tool_call><function=add><parameter=a>1</parameter></function></tool", [ADD]),
]
CUT = ('{"a": 1}}', "</tool_", "</tool")  # what those end with that are calls at the end of a text only


@pytest.mark.parametrize(("name", "text", "expected"), CONVENTIONS)
def test_calls_of_each_format_are_found(name: str, text: str, expected: list[tuple[str, str]]) -> None:
    assert whole(name, text) == calls(*expected)
    if name != "llama":  # where a call is bare, only a text that begins with it is one
        assert whole(name, f"I'll call. \n {text}") == [Content("I'll call."), *calls(*expected)]


@pytest.mark.parametrize("text", [text for _, text, _ in CONVENTIONS])
def test_without_tools_calls_are_content(text: str) -> None:
    assert whole(None, text) == [Content(text)]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, _ in CONVENTIONS])
def test_calls_of_other_functions_are_content_as_they_were_written(name: str, text: str) -> None:
    other = re.sub(r"\b(add|wait)\b", "remove", text)
    assert whole(name, f"A {other} B") == [Content(f"A {other} B")]


@pytest.mark.parametrize(("name", "text", "expected"), CONVENTIONS)
def test_a_call_that_is_cut_short_is_content_and_the_calls_before_it_are_calls(
    name: str, text: str, expected: list[tuple[str, str]]
) -> None:
    for length in range(1, len(text)):
        parts = whole(name, text[:length])
        found = [part for part in parts if isinstance(part, ToolCall)]
        assert found == calls(*expected)[: len(found)]
        if not found:
            assert parts == [Content(text[:length])]
        else:
            rest = "".join(part.text for part in parts if isinstance(part, Content))
            assert not rest or text[:length].endswith(rest)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',  # a brace too few
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1]}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"note": "a\nb"}}\n</tool_call>',  # a newline inside a string
        '<tool_call>\n{"name": "add", "arguments": {"note": "unterminated}}\n</tool_call>',
        "<tool_call>\n{'name': 'add', 'arguments': {}}\n</tool_call>",
        '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": "1"}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}\n</tool_call>',
        '<tool_call>\n{"name": "add", "argument": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {}, "parameters": {}}\n</tool_call>',
        '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": ["add"], "arguments": {}}\n</tool_call>',
        '<tool_call>\n[{"name": "add", "arguments": {}}]\n</tool_call>',
        "<tool_call>\nadd\n</tool_call>",
        '<tool_call>\n{"name": [[[[[[[[[[[[[[',
        '<tool_call>\n{"name": "add", "arguments": ' + '{"a":' * 15_000 + "1" + "}" * 15_001 + "\n</tool_call>",
    ],
)
def test_what_is_no_call_is_content_and_a_call_after_it_is_found(text: str) -> None:
    after = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert whole("hermes", text) == [Content(text)]
    assert whole("hermes", f"A  {text} \n {after}") == [Content(f"A  {text}"), *calls(ADD)]


def test_arguments_come_as_they_were_written() -> None:
    written = '{"b" : 1.10, "a":1e999,"a": 12345678901234567890123,  "note":"\\u00e9\\ud800 é </tool_call>"}'
    text = f'<tool_call>{{"name":"add","arguments":{written}}}</tool_call>'
    assert whole("hermes", text) == calls(("add", written))


def test_arguments_in_a_string_are_taken_out_of_it() -> None:
    written = '{"a": 1, "note": "\\"é"}'
    text = f"<tool_call>{json.dumps({'name': 'add', 'arguments': written})}</tool_call>"
    assert whole("hermes", text) == calls(("add", written))


def test_white_space_around_calls_is_dropped_and_kept_elsewhere() -> None:
    call = '<tool_call>{"name": "wait"}</tool_call>'
    assert whole("hermes", f" A \n B \n\n{call}\n\n{call} \n C \n") == [
        Content(" A \n B"),
        *calls(("wait", "{}"), ("wait", "{}")),
        Content("C \n"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '  {"name": "add", "colour": 1} and more',
        '{"name": "somebody", "parameters": {}}',
        '{"answer": 42} {"name": "wait", "parameters": {}}',
        "{not json",
        'The call {"name": "add", "parameters": {"a": 1}} is how it goes.',
        "<|python_tag|>print(1)",
        "{",
    ],
)
def test_bare_json_that_is_no_call_is_content(text: str) -> None:
    assert whole("llama", text) == [Content(text)]


def test_text_may_follow_a_bare_call() -> None:
    call = '{"name": "wait", "parameters": {}}'
    assert whole("llama", f"{call} ; and so on") == [*calls(("wait", "{}")), Content("; and so on")]
    assert whole("llama", f"{call}\n{call} {{}}") == [*calls(("wait", "{}"), ("wait", "{}")), Content("{}")]


def test_a_wrong_call_in_an_array_leaves_the_one_before_it() -> None:
    text = '[TOOL_CALLS] [{"name": "wait"}, {"name": "remove"}] end'
    assert whole("mistral", text) == [*calls(("wait", "{}")), Content(', {"name": "remove"}] end')]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("<parameter=a>\n7\n</parameter>", {"a": 7}),
        ("<parameter=a>\nseven\n</parameter>", {"a": "seven"}),
        ("<parameter=a>\ntrue\n</parameter>", {"a": "true"}),
        ("<parameter=a>\n1e3\n</parameter>", {"a": 1000.0}),
        ("<parameter=b>\n0.10\n</parameter>", {"b": 0.1}),
        ("<parameter=b>\nNone\n</parameter>", {"b": None}),
        ("<parameter=note>\n5\n</parameter>", {"note": "5"}),
        ("<parameter=note>\nnull\n</parameter>", {"note": "null"}),
        ("<parameter=either>\n5\n</parameter>", {"either": "5"}),
        ("<parameter=perhaps>\nnull\n</parameter>", {"perhaps": None}),
        ("<parameter=perhaps>\nnone\n</parameter>", {"perhaps": "none"}),
        ("<parameter=note>\n\n x\n\n</parameter>", {"note": "\n x\n"}),
        ("<parameter=note></parameter>", {"note": ""}),
        ("<parameter=note>\n</parameter> <b>é</b>\n</parameter>", {"note": "</parameter> <b>é</b>"}),
        ("<parameter=note>\n</tool_call>\n</parameter>", {"note": "</tool_call>"}),
        ("<parameter=other>\n{}\n</parameter>\n<parameter=a>\n1\n</parameter>", {"other": "{}", "a": 1}),
    ],
)
def test_values_between_tags_are_what_their_schema_says(written: str, value: dict[str, Any]) -> None:
    text = f"<tool_call>\n<function=add>\n{written}\n</function>\n</tool_call>"
    [call] = whole("qwen-xml", text)
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == value
    assert type(next(iter(json.loads(call.arguments).values()))) is type(next(iter(value.values())))


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\nwords\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
    ],
)
def test_tags_that_do_not_fit_are_content(text: str) -> None:
    assert whole("qwen-xml", text) == [Content(text)]


def test_reasoning_comes_out_as_such_without_the_newlines_around_it() -> None:
    text = "<think>\nFirst,\n\nthen.\n</think>\n\nThe answer\n"
    assert whole(None, text, reasoning=THINK) == [Reasoning("First,\n\nthen."), Content("The answer\n")]
    bracketed = text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    assert whole(None, bracketed, reasoning=BRACKETS) == whole(None, text, reasoning=THINK)
    assert whole(None, text) == [Content(text)]
    assert whole(None, text, reasoning=BRACKETS) == [Content(text)]


def test_reasoning_that_the_prompt_has_opened_is_reasoning_from_the_start() -> None:
    text = " First.</think>Answer </think>"
    assert whole(None, text, reasoning=THINK, inside=True) == [Reasoning(" First."), Content("Answer </think>")]
    repeated = f"\n<think>{text}"
    assert whole(None, repeated, reasoning=THINK, inside=True) == whole(None, text, reasoning=THINK, inside=True)
    assert whole(None, "never ends </thin", reasoning=THINK, inside=True) == [Reasoning("never ends </thin")]


def test_reasoning_begins_the_text_or_is_none() -> None:
    for text in ("An end </think> alone", "Say <think> to me </think>", "  <thinking>x</think>", "<thin"):
        assert whole(None, text, reasoning=THINK) == [Content(text)]


def test_no_reasoning_is_no_part() -> None:
    assert whole(None, "<think>\n\n</think>\n\nHi", reasoning=THINK) == [Content("Hi")]
    assert whole(None, "</think>Hi", reasoning=THINK, inside=True) == [Content("Hi")]
    assert whole(None, "", reasoning=THINK, inside=True) == []


@pytest.mark.parametrize(("name", "text", "expected"), CONVENTIONS)
def test_a_call_in_reasoning_is_reasoning_and_one_after_it_is_a_call(
    name: str, text: str, expected: list[tuple[str, str]]
) -> None:
    parts = whole(name, f"<think>\nI could {text} \n</think>\n{text}", reasoning=THINK)
    reasoning = Reasoning(f"I could {text} \n".rstrip("\n"))
    assert parts == [reasoning, *calls(*expected)]


@pytest.mark.parametrize(("name", "text", "expected"), CONVENTIONS)
def test_nothing_follows_the_first_call_where_only_one_is_wanted(
    name: str, text: str, expected: list[tuple[str, str]]
) -> None:
    if not text.rstrip().endswith(CUT):
        assert whole(name, f"{text}{text} more", first_only=True) == calls(expected[0])
    splitter = splitter_for(name, first_only=True)
    splitter.feed(text)
    splitter.end()
    assert splitter.done
    assert splitter.feed(text) == splitter.end() == []


def test_a_call_that_is_none_does_not_end_the_text() -> None:
    splitter = splitter_for("hermes", first_only=True)
    splitter.feed('<tool_call>{"name": "remove"}</tool_call>')
    assert not splitter.done
    splitter.feed('<tool_call>{"name": "wait"}</tool_call>')
    assert splitter.done


def test_text_is_held_back_no_longer_than_it_may_begin_a_marker() -> None:
    splitter = splitter_for("hermes", reasoning=THINK)
    assert splitter.feed("<") == []
    assert splitter.feed("b> and <tool") == [Content("<b> and")]
    assert splitter.feed("_box>") == [Content(" <tool_box>")]
    assert splitter.feed(" ") == []
    assert splitter.feed("x") == [Content(" x")]
    inside = splitter_for(None, reasoning=THINK, inside=True)
    assert inside.feed("Hm </thin") == [Reasoning("Hm ")]
    assert inside.feed("g") == [Reasoning("</thing")]
    assert splitter_for(None).feed("<tool_call>") == [Content("<tool_call>")]


def test_a_call_comes_out_as_soon_as_it_is_whole() -> None:
    splitter = splitter_for("hermes")
    assert splitter.feed('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call') == []
    assert splitter.feed(">") == calls(ADD)
    array = splitter_for("mistral")
    assert array.feed('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}') == calls(ADD)


def test_ids_are_as_openais() -> None:
    ids = {new_call_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", each) for each in ids)


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
    "<function=add>", "</function>", "<parameter=a>", "</parameter>", '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "wait"}', '{"name":', "{", "}", "[", "]", '"', "\\", ",", ";", ":", " ", "\n", "\n\n", "\x00", "a", "é",
    "add", "wait", "1", "<", "</", "[", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
)  # fmt: skip

OPTIONS = st.fixed_dictionaries(
    {"reasoning": st.sampled_from([None, THINK]), "inside": st.booleans(), "first_only": st.booleans()}
)


@settings(deadline=None, max_examples=400)
@given(
    name=st.sampled_from([None, *FORMATS]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    options=OPTIONS,
    data=st.data(),
)
def test_how_the_text_is_cut_does_not_matter(
    name: str | None, fragments: list[str], options: dict[str, Any], data: st.DataObject
) -> None:
    text = "".join(fragments)
    parts = whole(name, text, **options)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert split(pieces, splitter_for(name, **options)) == parts
    if options["reasoning"] is None and not any(isinstance(part, ToolCall) for part in parts):
        assert parts == ([Content(text)] if text else [])


def written(name: str, function: str, arguments: dict[str, Any]) -> str:
    """A call as a model of the format writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    return {
        "hermes": f'<tool_call>\n{{"name": "{function}", "arguments": {text}}}\n</tool_call>',
        "llama": f'<|python_tag|>{{"name": "{function}", "parameters": {text}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "{function}", "arguments": {text}}}]',
        "mistral-named": f"[TOOL_CALLS]{function}[ARGS]{text}",
    }[name]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.text("ab <>[]{}/;é", min_size=1).filter(lambda text: text.strip(" ") and text.strip(" ")[0] not in "{;")
CALLS = st.tuples(st.sampled_from(["add", "wait"]), st.dictionaries(st.text(max_size=5), VALUES, max_size=3))


@settings(deadline=None, max_examples=100)
@given(
    name=st.sampled_from(["hermes", "llama", "mistral", "mistral-named"]),
    pieces=st.lists(WORDS | CALLS, max_size=5),
    size=st.integers(1, 9),
)
def test_any_text_with_calls_comes_apart_as_it_was_put_together(
    name: str, pieces: list[str | tuple[str, dict[str, Any]]], size: int
) -> None:
    text = "".join(piece if isinstance(piece, str) else "\n" + written(name, *piece) + "\n" for piece in pieces)
    parts = split([text[at : at + size] for at in range(0, len(text), size)], splitter_for(name))
    expected_calls = [piece for piece in pieces if not isinstance(piece, str)]
    found = [part for part in parts if isinstance(part, ToolCall)]
    assert [(call.name, json.loads(call.arguments)) for call in found] == expected_calls
    assert [call.index for call in found] == list(range(len(found)))
    said = "".join("".join(piece.split()) for piece in pieces if isinstance(piece, str))
    assert "".join("".join(part.text.split()) for part in parts if isinstance(part, Content)) == said


def test_long_arguments_take_time_in_proportion_to_their_length() -> None:
    splitter = splitter_for("hermes")
    splitter.feed('<tool_call>{"name": "add", "arguments": {"note": "')
    for _ in range(30_000):
        assert splitter.feed("word ") == []
    [call] = splitter.feed('"}}</tool_call>')
    assert isinstance(call, ToolCall)
    assert len(json.loads(call.arguments)["note"]) == 150_000
