"""Conversations as OpenAI's clients send them → as chat templates read them. Knows both shapes and no template."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from service.errors import RequestError

SHORT_ID = 9  # letters and digits, as Mistral's templates want it


def for_template(
    messages: Sequence[Mapping[str, Any]], *, keep_developer: bool = False, short_ids: bool = False
) -> list[dict[str, Any]]:
    """Rewrite messages; what is None is left out.

    Content is one text, empty where there is none. Arguments of calls are objects instead of JSON text. A tool's
    message gets the name of the function whose result it is, unless it has one. Everything else stays.

    Args:
        messages: with role and content (a text, text parts, or None), and where they apply tool_calls, tool_call_id,
            name and reasoning_content.
        keep_developer: whether the template knows the role developer, which otherwise becomes system.
        short_ids: whether ids of calls become nine letters and digits, the same for the same id.

    Raises:
        RequestError: the arguments of a call are not an object.
    """
    names: dict[str, str] = {}
    rewritten = []
    for number, message in enumerate(messages):
        given = {key: value for key, value in message.items() if value is not None}
        if given["role"] == "developer" and not keep_developer:
            given["role"] = "system"
        given["content"] = _text(given.get("content", ""))
        if "tool_calls" in given:
            names |= {call["id"]: call["function"]["name"] for call in given["tool_calls"]}
            given["tool_calls"] = [
                _call(call, place=f"messages.{number}.tool_calls.{index}", short_ids=short_ids)
                for index, call in enumerate(given["tool_calls"])
            ]
        if "tool_call_id" in given:
            called = given["tool_call_id"]
            given["tool_call_id"] = _id(called, short=short_ids)
            if called in names:
                given.setdefault("name", names[called])
        rewritten.append(given)
    return rewritten


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def _text(content: str | list[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _call(call: Mapping[str, Any], *, place: str, short_ids: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = _arguments(function["arguments"], place)
    return {**call, "id": _id(call["id"], short=short_ids), "function": {**function, "arguments": arguments}}


def _arguments(text: str, place: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")  # some clients send nothing where there are none
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: the arguments are not JSON: {error}", param="messages") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}: the arguments are not a JSON object", param="messages")
    return arguments


def _id(identifier: str, *, short: bool) -> str:
    if not short or (len(identifier) == SHORT_ID and identifier.isascii() and identifier.isalnum()):
        return identifier
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT_ID]
