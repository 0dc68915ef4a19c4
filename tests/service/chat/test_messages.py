"""Messages become what templates read."""

from typing import Any

import pytest

from service.chat.messages import for_template, has_calls
from service.errors import RequestError


def call(identifier: str, arguments: str, name: str = "add") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_content_is_one_text() -> None:
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
    ]
    assert [message["content"] for message in for_template(messages)] == ["a\nb", "", ""]


def test_what_is_none_is_left_out_and_the_rest_stays() -> None:
    [message] = for_template([{"role": "assistant", "content": "x", "name": None, "reasoning_content": "hm"}])
    assert message == {"role": "assistant", "content": "x", "reasoning_content": "hm"}


def test_arguments_are_objects_and_the_clients_messages_stay_as_they_were() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("1", '{"a": [1, null]}'), call("2", "")]}
    [rewritten] = for_template([message])
    assert [each["function"]["arguments"] for each in rewritten["tool_calls"]] == [{"a": [1, None]}, {}]
    assert message["tool_calls"] == [call("1", '{"a": [1, null]}'), call("2", "")]


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", '"{}"', "1" * 5000, "[" * 200_000])
def test_arguments_that_are_no_object_are_refused_with_their_place(arguments: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call("1", arguments)]},
    ]
    with pytest.raises(RequestError, match=r"^messages\.1\.tool_calls\.0: the arguments are not") as refused:
        for_template(messages)
    assert refused.value.param == "messages"


def test_results_get_the_name_of_their_function() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call("1", "{}", "add"), call("2", "{}", "wait")]},
        {"role": "tool", "tool_call_id": "2", "content": "x"},
        {"role": "tool", "tool_call_id": "1", "content": "x", "name": "other"},
        {"role": "tool", "tool_call_id": "3", "content": "x"},
    ]
    assert [message.get("name") for message in for_template(messages)[1:]] == ["wait", "other", None]


def test_developer_becomes_system_unless_it_is_kept() -> None:
    message = {"role": "developer", "content": "x"}
    assert for_template([message])[0]["role"] == "system"
    assert for_template([message], keep_developer=True)[0]["role"] == "developer"


def test_short_ids_are_nine_letters_and_digits_of_which_calls_and_results_have_the_same() -> None:
    long, short, marked = "call_0123456789abcdef01234567", "abc123DEF", "abc-12345"
    calls = [call(identifier, "{}") for identifier in (long, short, marked)]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": ""} for each in calls]
    first, *rest = for_template([{"role": "assistant", "tool_calls": calls}, *results], short_ids=True)
    ids = [each["id"] for each in first["tool_calls"]]
    assert ids == [each["tool_call_id"] for each in rest]
    assert ids[1] == short
    assert len(set(ids)) == 3
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert rest[0]["name"] == "add"
    assert for_template(results)[0]["tool_call_id"] == long


def test_calls_and_results_are_seen() -> None:
    assert has_calls([{"role": "assistant", "tool_calls": [call("1", "{}")]}])
    assert has_calls([{"role": "tool", "tool_call_id": "1", "content": "x"}])
    assert not has_calls([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": None}])
