"""Calls whose arguments are written as text between tags. Knows the tags and what a schema says of an argument's type,
not what stands around a call."""

import json
import re
from collections.abc import Mapping
from typing import Any

from service.chat.functions import Functions
from service.chat.json_calls import FoundCall, parse
from service.chat.text_reader import UnexpectedTextError

FUNCTION = re.compile(r"<function=([^<>\n]+)>\s*(.*)</function>", re.DOTALL)
# What looks like an end of the value may be part of it: the true one is followed by the next argument, or by nothing.
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)

PYTHON = {"True": "true", "False": "false", "None": "null"}  # how templates write them in earlier turns
JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


def xml_call_of(text: str, functions: Functions) -> FoundCall:
    """Read `<function=name>`, any number of `<parameter=key>`, value, `</parameter>`, and `</function>`.

    A value is a string unless the schema says that it is something else, and it reads as that.

    Raises:
        UnexpectedTextError: it is not of this shape, or names none of the functions.
    """
    function = FUNCTION.fullmatch(text)
    if function is None or function[1] not in functions:
        raise UnexpectedTextError
    properties = functions[function[1]].get("properties", {})
    arguments: dict[str, str] = {}
    at = 0
    while (parameter := PARAMETER.match(function[2], at)) is not None:
        key, value = parameter.groups()
        arguments[key] = _json_of(value, properties.get(key) if isinstance(properties, Mapping) else None)
        at = parameter.end()
    if function[2][at:].strip():
        raise UnexpectedTextError
    members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
    return FoundCall(function[1], "{" + ", ".join(members) + "}")


def _json_of(text: str, schema: Any) -> str:
    """A value as JSON text, as it was written where that is JSON."""
    types = _types(schema)
    written = PYTHON.get(text.strip(), text.strip())
    if "string" in types:  # a union with a string leaves only null without doubt
        types &= {"null"}
    try:
        value = parse(written)
    except UnexpectedTextError:
        return json.dumps(text, ensure_ascii=False)
    return written if any(_is(value, name) for name in types) else json.dumps(text, ensure_ascii=False)


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):  # which Python counts among the integers
        return name == "boolean"
    if isinstance(value, float) and name == "integer":
        return value.is_integer()
    return isinstance(value, JSON_TYPES.get(name, ()))


def _types(schema: Any) -> set[str]:
    """The types that a schema allows by name; none where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
    for union in ("anyOf", "oneOf"):
        alternatives = schema.get(union, [])
        types |= {name for each in alternatives for name in _types(each)} if isinstance(alternatives, list) else set()
    return types
