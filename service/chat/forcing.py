"""Grammars that force calls: what is generated is calls of some functions, as the model's format writes them, with
arguments that their schemas accept. Knows formats and llguidance's notation, not who asks."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

from service.chat.formats import CallFrame, ToolFormat
from service.chat.functions import Functions
from service.chat.reasoning import ReasoningMarkers
from service.chat.special_tokens import special_markers
from service.engine.grammar import WHITESPACE, GrammarSpec
from service.errors import RequestError


def forced_calls(
    tokenizer: Tokenizer,
    tool_format: ToolFormat,
    functions: Functions,
    *,
    only: str | None = None,
    parallel: bool = False,
    reasoning: ReasoningMarkers | None = None,
    inside_reasoning: bool = False,
) -> GrammarSpec:
    """A grammar of one call, or of one or more.

    Args:
        tokenizer: the model's; markers that it has as special tokens must come as these.
        tool_format: how the model writes calls.
        functions: what may be called.
        only: the one function that is to be called, None for any.
        parallel: whether several calls may come.
        reasoning: the markers around reasoning that may come first, None for none.
        inside_reasoning: whether the text begins inside reasoning, which then must come to its end first.

    Raises:
        RequestError: the format cannot be forced, there is no such function, or its arguments are not an object.
    """
    frame = tool_format.frame
    if frame is None:
        message = (
            f"tool_choice: calls cannot be forced in the model's tool-call format ({tool_format.name}), only allowed"
        )
        raise RequestError(message, param="tool_choice")
    if only is not None and only not in functions:
        raise RequestError(f"tool_choice: there is no function {only} among the tools", param="tool_choice")
    if not functions:
        raise RequestError("tool_choice: there are no tools to call", param="tool_choice")
    special = special_markers(tokenizer, tool_format, reasoning)
    allowed = functions if only is None else {only: functions[only]}
    more = f"({_terms(frame.separator, special)} call)*" if parallel else ""
    rules = {
        "start": f"{_thought(reasoning, inside_reasoning, special)} calls",
        "calls": f"{_terms(frame.opening, special)} call {more} {_terms(frame.closing, special)}",
        "call": " | ".join(f"call_{number}" for number in range(len(allowed))),
    }
    for number, (name, schema) in enumerate(allowed.items()):
        rules[f"call_{number}"] = _call(frame, name, schema, special)
    if reasoning is not None:
        rules |= _thought_rules(reasoning, special)
    return GrammarSpec.grammar("%llguidance {}\n" + "".join(f"{name}: {body}\n" for name, body in rules.items()))


def _call(frame: CallFrame, name: str, schema: Mapping[str, Any], special: Mapping[str, int]) -> str:
    quoted = json.dumps(name, ensure_ascii=False)[1:-1]
    before = _terms(frame.before_name + quoted + frame.before_arguments, special)
    arguments = json.dumps(_object_schema(name, schema))
    return f"{before} %json {arguments} {_terms(frame.after_arguments, special)}"


def _object_schema(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of arguments, which are an object whether it says so or not. It stays whole: its references count from
    its root."""
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise RequestError(f"tools: the parameters of {name} are not an object", param="tools")
    return {**schema, "type": "object", "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _thought(reasoning: ReasoningMarkers | None, inside: bool, special: Mapping[str, int]) -> str:
    if reasoning is None:
        return ""
    return "thought" if inside else f"({_terms(reasoning.opening, special)} thought)?"


def _thought_rules(reasoning: ReasoningMarkers, special: Mapping[str, int]) -> dict[str, str]:
    """Any text as far as the closing marker, and newlines before what follows."""
    newlines = r"/\n{0,2}/"
    if reasoning.closing in special:
        return {"thought": f"/(?s:.*)/ {_terms(reasoning.closing, special)} {newlines}"}
    return {
        "thought": f"thinking {newlines}",
        f"thinking[suffix={json.dumps(reasoning.closing)}]": "/(?s:.*)/",
    }


def _terms(text: str, special: Mapping[str, int]) -> str:
    """A text as the grammar's terms: strings, and special tokens by their ids."""
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
        for part in _split(text, special)
    )


def _split(text: str, markers: Iterable[str]) -> list[str]:
    pattern = "|".join(map(re.escape, markers))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    return [part for part in parts if part]
