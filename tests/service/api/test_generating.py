"""What is particular to a route: the chat template, two names for one limit, options of a stream."""

from typing import Any

import httpx
import pytest

from tests.fakes import expected_output
from tests.serving import error_of, fake_server

HELLO = {"role": "user", "content": "Hello"}


def chat(client: httpx.Client, *messages: dict[str, str], **fields: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"messages": list(messages), "max_tokens": 8} | fields)


def test_the_chat_template_is_applied_to_the_whole_conversation(client: httpx.Client) -> None:
    conversation = (
        {"role": "system", "content": "Be brief."},
        HELLO,
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    )
    tokens = [1, *b"Be brief.", 2, *b"Hello", 3, *b"Hi.", 2, *b"Bye", 3]
    answer = chat(client, *conversation).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert answer["choices"][0]["message"]["content"] == bytes(expected_output(tokens, 8)).decode()


def test_pieces_of_text_are_joined_and_a_developer_is_the_system(client: httpx.Client) -> None:
    pieces = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": pieces}]}
    answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 8}).json()
    plain = chat(client, {"role": "system", "content": "Be brief."}, HELLO).json()
    assert answer["choices"] == plain["choices"]


def test_what_the_chat_template_refuses_is_a_400_with_its_words(client: httpx.Client) -> None:
    response = chat(client, HELLO, {"role": "system", "content": "late"})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "system comes first" in error["message"]


def test_a_model_without_a_chat_template_says_what_to_use_instead() -> None:
    with fake_server(chat_template=None) as server:
        response = chat(server.client, HELLO)
        assert response.status_code == 400
        assert "/v1/completions" in error_of(response)["message"]
        assert server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("limits", "completion"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
        ({"max_tokens": None, "max_completion_tokens": 3}, 3),
        ({}, 256 - 7),
    ],
)
def test_both_names_of_the_limit_work(client: httpx.Client, limits: dict[str, int], completion: int) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": [HELLO]} | limits).json()
    assert answer["usage"]["completion_tokens"] == completion


def test_two_different_limits_are_refused_with_both(client: httpx.Client) -> None:
    error = error_of(chat(client, HELLO, max_tokens=5, max_completion_tokens=6))
    assert error["param"] == "max_completion_tokens"
    assert "max_tokens is 5 and max_completion_tokens is 6" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, None])
def test_options_of_a_stream_without_a_stream_are_refused(client: httpx.Client, path: str, stream: bool | None) -> None:
    prompt = {"messages": [HELLO]} if "chat" in path else {"prompt": "a"}
    body = prompt | {"stream": stream, "stream_options": {"include_usage": True}}
    response = client.post(path, json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, "stream_options")
