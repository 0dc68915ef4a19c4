"""Whatever the model says, what it generates under these grammars is calls that may be made."""

import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from model_patches.loading.load import load_tokenizer
from service.chat.forcing import forced_calls
from service.chat.formats import FORMATS
from service.chat.functions import NO_PARAMETERS, Functions
from service.chat.reasoning import REASONING, ReasoningMarkers
from service.chat.special_tokens import special_markers
from service.chat.splitter import Part, Reasoning, Splitter, ToolCall, Tools
from service.engine.grammar import GrammarError, GrammarFactory, GrammarSpec, Matcher
from service.errors import RequestError

END = 2
MOST_TOKENS = 400
FORCED = [name for name, each in FORMATS.items() if each.frame is not None]

FUNCTIONS: Functions = {
    "add": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/small"}, "note": {"type": "string", "maxLength": 6}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"small": {"type": "integer", "minimum": -50, "maximum": 50}},
    },
    "add_all": {
        "properties": {"of": {"type": "array", "items": {"enum": ["x", 'qu"o', "</tool_call>"]}, "maxItems": 3}},
        "additionalProperties": False,
    },
    "wait": NO_PARAMETERS,
}

THINK = REASONING[0]


class Vocabulary:
    """A tokenizer with its grammars, and texts of its tokens with the markers that a splitter must see."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.factory = GrammarFactory(tokenizer, frozenset({END}))

    def matcher(self, spec: GrammarSpec) -> Matcher:
        return self.factory.begin(spec, param="tool_choice").result().new_matcher()

    def text(self, token_ids: list[int], kept: dict[str, int]) -> str:
        added = self.tokenizer.get_added_tokens_decoder()
        seen = [each for each in token_ids if each not in added or each in kept.values() or not added[each].special]
        text: str = self.tokenizer.decode(seen, skip_special_tokens=False)
        return text


@pytest.fixture(scope="module")
def plain(embedded_model_folder: Path) -> Vocabulary:
    """Markers are text."""
    tokenizer: Tokenizer = load_tokenizer(embedded_model_folder).backend_tokenizer
    return Vocabulary(tokenizer)


@pytest.fixture(scope="module")
def special(plain: Vocabulary) -> Vocabulary:
    """Markers are special tokens."""
    tokenizer = Tokenizer.from_str(plain.tokenizer.to_str())
    markers = {marker for each in FORMATS.values() for marker in each.markers} | {THINK.opening, THINK.closing}
    tokenizer.add_special_tokens(sorted(markers))
    return Vocabulary(tokenizer)


@pytest.fixture(params=["plain", "special"])
def vocabulary(request: pytest.FixtureRequest, plain: Vocabulary, special: Vocabulary) -> Vocabulary:
    return plain if request.param == "plain" else special


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.allowed(), dtype=np.uint8), bitorder="little")
    return [int(each) for each in np.flatnonzero(bits)]


def draw(matcher: Matcher, random: Random) -> list[int] | None:
    """Tokens, each any of those that may come, until the text ends; None if it does not."""
    tokens: list[int] = []
    for _ in range(MOST_TOKENS):
        token = random.choice(allowed(matcher))
        stopped = matcher.consume(token)
        if token == END:
            return tokens
        tokens.append(token)
        if stopped:
            return tokens
    return None


def parts_of(text: str, name: str, **options: Any) -> list[Part]:
    splitter = Splitter(tools=Tools(FORMATS[name], FUNCTIONS), **options)
    return [*splitter.feed(text), *splitter.end()]


def drawn(vocabulary: Vocabulary, name: str, count: int, **options: Any) -> list[list[ToolCall]]:
    """The calls of some random texts; all there is in these texts is calls."""
    spec = forced_calls(vocabulary.tokenizer, FORMATS[name], FUNCTIONS, **options)
    kept = special_markers(vocabulary.tokenizer, FORMATS[name], None)
    texts = [draw(vocabulary.matcher(spec), Random(seed)) for seed in range(count)]
    ended = [vocabulary.text(tokens, kept) for tokens in texts if tokens is not None]
    assert len(ended) >= 0.8 * count
    result = []
    for text in ended:
        parts = parts_of(text, name)
        assert all(isinstance(part, ToolCall) for part in parts), (text, parts)
        result.append([part for part in parts if isinstance(part, ToolCall)])
    return result


@pytest.mark.parametrize("name", FORCED)
def test_one_call_is_what_any_tokens_make(vocabulary: Vocabulary, name: str) -> None:
    texts = drawn(vocabulary, name, 25)
    assert {len(calls) for calls in texts} == {1}
    for [call] in texts:
        jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name])
    assert {call.name for [call] in texts} == set(FUNCTIONS)


@pytest.mark.parametrize("name", FORCED)
def test_several_calls_are_what_any_tokens_make_where_they_may(vocabulary: Vocabulary, name: str) -> None:
    texts = drawn(vocabulary, name, 25, parallel=True)
    for calls in texts:
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name])
    assert {1, 2} <= {len(calls) for calls in texts}


@pytest.mark.parametrize("name", FORCED)
def test_a_named_function_is_the_one_that_is_called(vocabulary: Vocabulary, name: str) -> None:
    for only in ("add", "wait"):
        texts = drawn(vocabulary, name, 8, only=only, parallel=True)
        assert {call.name for calls in texts for call in calls} == {only}


@pytest.mark.parametrize("name", FORCED)
def test_calls_look_as_the_model_was_trained_to_write_them(plain: Vocabulary, name: str) -> None:
    spec = forced_calls(plain.tokenizer, FORMATS[name], FUNCTIONS, parallel=True)
    text = {
        "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>',
        "llama": '{"name": "add", "parameters": {"a": 1}}; {"name": "wait", "parameters": {}}',
        "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "wait", "arguments": {}}]',
        "mistral-named": '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]wait[ARGS]{}',
    }[name]
    matcher = plain.matcher(spec)
    for token in plain.tokenizer.encode(text, add_special_tokens=False).ids:
        matcher.consume(token)
    assert END in allowed(matcher)
    assert [call.name for call in parts_of(text, name) if isinstance(call, ToolCall)] == ["add", "wait"]


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral-named"])
def test_markers_that_are_special_tokens_come_as_these(special: Vocabulary, name: str) -> None:
    spec = forced_calls(special.tokenizer, FORMATS[name], FUNCTIONS, only="wait")
    opening = FORMATS[name].openings[0]
    assert allowed(special.matcher(spec)) == [special.tokenizer.token_to_id(opening)]
    tokens = draw(special.matcher(spec), Random(0))
    assert tokens is not None
    assert opening not in special.text(tokens, {})
    assert not any(isinstance(part, ToolCall) for part in parts_of(special.text(tokens, {}), name))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["hermes", "llama"])
def test_reasoning_may_come_first(vocabulary: Vocabulary, name: str, inside: bool) -> None:
    options: dict[str, Any] = {"reasoning": THINK, "inside_reasoning": inside}
    spec = forced_calls(vocabulary.tokenizer, FORMATS[name], FUNCTIONS, **options)
    call = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    if name == "llama":
        call = '{"name": "wait", "parameters": {}}'
    thought = "I could <b>wait</b> {or} not.\n</think>\n\n"
    text = thought + call if inside else f"<think>\n{thought}{call}"
    matcher = vocabulary.matcher(spec)
    tokens = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    for token in tokens:
        assert END not in allowed(matcher)
        stopped = matcher.consume(token)
    assert stopped or allowed(matcher) == [END]
    kept = special_markers(vocabulary.tokenizer, FORMATS[name], THINK)
    reasoning, *calls = parts_of(vocabulary.text(tokens, kept), name, **options)
    assert reasoning == Reasoning("I could <b>wait</b> {or} not.")
    assert [part.name for part in calls if isinstance(part, ToolCall)] == ["wait"]
    without = vocabulary.matcher(spec)
    direct = vocabulary.tokenizer.encode(call, add_special_tokens=False).ids
    if not inside:  # the model need not think
        assert [without.consume(token) for token in direct][-1] or allowed(without) == [END]


def test_text_beside_a_call_is_not_allowed(plain: Vocabulary) -> None:
    spec = forced_calls(plain.tokenizer, FORMATS["hermes"], FUNCTIONS)
    for text in ("S", '<tool_call>\n{"name": "r', '<tool_call>\n{"name": "add", "arguments": {"a": 99'):
        matcher = plain.matcher(spec)
        *before, last = plain.tokenizer.encode(text, add_special_tokens=False).ids
        for token in before:
            matcher.consume(token)
        with pytest.raises(GrammarError):
            matcher.consume(last)


def forced(plain: Vocabulary, functions: Functions, *, name: str = "hermes", only: str | None = None) -> GrammarSpec:
    return forced_calls(plain.tokenizer, FORMATS[name], functions, only=only)


@pytest.mark.parametrize(
    ("functions", "name", "only", "message", "param"),
    [
        (FUNCTIONS, "qwen-xml", None, "cannot be forced in .*qwen-xml", "tool_choice"),
        (FUNCTIONS, "hermes", "remove", "no function remove among", "tool_choice"),
        ({}, "hermes", None, "no tools to call", "tool_choice"),
        ({"f": {"type": "string"}}, "hermes", None, "parameters of f are not an object", "tools"),
        ({"f": {"type": 5}}, "hermes", None, "parameters of f are not an object", "tools"),
        ({"f": {"type": None}}, "hermes", None, "parameters of f are not an object", "tools"),
        ({"f": {"type": ["null", "array"]}}, "llama", None, "parameters of f are not an object", "tools"),
    ],
)
def test_what_cannot_be_forced_is_refused(
    plain: Vocabulary, functions: Functions, name: str, only: str | None, message: str, param: str
) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        forced(plain, functions, name=name, only=only)
    assert refused.value.param == param


def test_arguments_are_an_object_where_the_schema_does_not_say(plain: Vocabulary) -> None:
    for schema in ({}, {"type": ["object", "null"]}, {"$ref": "#/$defs/x", "$defs": {"x": {}}}):
        matcher = plain.matcher(forced(plain, {"f": schema}))
        start = '<tool_call>\n{"name": "f", "arguments":'
        for token in plain.tokenizer.encode(start, add_special_tokens=False).ids:
            matcher.consume(token)
        follow = {plain.tokenizer.decode([token]).strip()[:1] for token in allowed(matcher)}
        assert follow <= {"{", ""}


@pytest.mark.parametrize("markers", REASONING)
def test_names_with_any_characters_are_written_as_json(plain: Vocabulary, markers: ReasoningMarkers) -> None:
    name = 'a"b\\c/é\n%json <[0]>'
    spec = forced_calls(plain.tokenizer, FORMATS["hermes"], {name: NO_PARAMETERS}, reasoning=markers)
    text = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {{}}}}\n</tool_call>'
    matcher = plain.matcher(spec)
    stopped = [matcher.consume(token) for token in plain.tokenizer.encode(text, add_special_tokens=False).ids]
    assert stopped[-1] or allowed(matcher) == [END]
