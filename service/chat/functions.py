"""What a request lets the model call. Knows OpenAI's shape of tools."""

from collections.abc import Mapping
from typing import Any

from service.errors import RequestError

Functions = Mapping[str, Mapping[str, Any]]
"""A function's name to the JSON schema of its arguments."""

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def functions_of(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A request's functions and the schemas of their arguments.

    Args:
        tools: as OpenAI's clients send them: `{"type": "function", "function": {"name": …, "parameters": {…}}}`.

    Raises:
        RequestError: two have the same name.
    """
    functions: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(tools):
        function = tool["function"]
        if function["name"] in functions:
            raise RequestError(f"tools.{number}: there is a function {function['name']} already", param="tools")
        parameters = function.get("parameters")
        functions[function["name"]] = NO_PARAMETERS if parameters is None else parameters
    return functions
