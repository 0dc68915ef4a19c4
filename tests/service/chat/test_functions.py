"""A request's tools become functions and schemas."""

import jsonschema
import pytest

from service.chat.functions import functions_of
from service.errors import RequestError


def test_functions_have_their_schemas_and_none_without_parameters_takes_any() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": schema}},
        {"type": "function", "function": {"name": "g", "parameters": None}},
        {"type": "function", "function": {"name": "h"}},
        {"type": "function", "function": {"name": "i", "parameters": {}}},
    ]
    functions = functions_of(tools)
    assert list(functions) == ["f", "g", "h", "i"]
    assert functions["f"] == schema
    assert functions["i"] == {}
    for name in ("g", "h"):
        jsonschema.validate({}, functions[name])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"a": 1}, functions[name])


def test_two_functions_of_one_name_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}] * 2
    with pytest.raises(RequestError, match=r"tools\.1.* f already"):
        functions_of(tools)
