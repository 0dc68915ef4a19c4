"""What a chat request may have beside text: messages of every role, their fields, values for the template."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving import FakeServer, error_of, fake_server

USER = {"role": "user", "content": "Hi"}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{# </tool_call> #}{% endif %}"
    "{% for message in messages %}[{% for key, value in message | dictsort %}{{ key }}={{ value }};{% endfor %}]"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}{% if style is defined %}{{ style }}{% endif %}"
    "{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}"
)
"""Writes all that it is given."""
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
WRITTEN_CALL = "{'id': 'call_1', 'type': 'function', 'function': {'name': 'f', 'arguments': {'a': 1}}}"


@pytest.fixture(scope="module")
def telling() -> Iterator[FakeServer]:
    """A server whose template can be read back by /tokenize."""
    with fake_server(chat_template=TEMPLATE, native_length=256, num_pages=1024) as server:
        yield server


def written(server: FakeServer, *messages: dict[str, Any], **fields: Any) -> str:
    """The prompt that a conversation becomes; a chat must take it too."""
    tokens = server.client.post("/tokenize", json={"messages": list(messages)} | fields)
    assert tokens.status_code == 200, tokens.text
    chat = server.client.post("/v1/chat/completions", json={"messages": list(messages), "max_tokens": 1} | fields)
    assert chat.status_code == 200, chat.text
    assert chat.json()["usage"]["prompt_tokens"] == tokens.json()["count"]
    return bytes(tokens.json()["tokens"]).decode()


def refusal(server: FakeServer, *messages: dict[str, Any], **fields: Any) -> tuple[str | None, str]:
    """What is wrong with a conversation, by a chat, by /tokenize and by /v1/rope/plan."""
    answers = [
        server.client.post(path, json={"messages": list(messages)} | fields)
        for path in ("/v1/chat/completions", "/tokenize", "/v1/rope/plan")
    ]
    assert {answer.status_code for answer in answers} == {400}
    [told] = {(error_of(answer)["param"], error_of(answer)["message"]) for answer in answers}
    return told


class TestMessages:
    def test_every_role_reaches_the_template(self, telling: FakeServer) -> None:
        conversation = (
            {"role": "system", "content": "S"},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "T", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "A", "name": "bot"},
        )
        assert written(telling, *conversation) == (
            "[content=S;role=system;][content=Hi;role=user;]"
            f"[content=;role=assistant;tool_calls=[{WRITTEN_CALL}];]"
            "[content=T;name=f;role=tool;tool_call_id=call_1;][content=A;name=bot;role=assistant;]>"
        )

    def test_a_developer_is_the_system_and_parts_are_joined(self, telling: FakeServer) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert written(telling, {"role": "developer", "content": parts}) == "[content=ab;role=system;]>"

    def test_earlier_reasoning_is_there_for_templates_that_read_it(self, telling: FakeServer) -> None:
        message = {"role": "assistant", "content": "A", "reasoning_content": "R"}
        assert "reasoning_content=R;" in written(telling, message)

    def test_what_only_answers_have_does_not_reach_the_template(self, telling: FakeServer) -> None:
        call = CALL | {"index": 0, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}  # type: ignore[dict-item]
        extra: dict[str, Any] = {
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "parsed": {"a": [1]},
        }
        plain = written(telling, {"role": "assistant", "content": "A", "tool_calls": [CALL]})
        assert written(telling, {"role": "assistant", "content": "A", "tool_calls": [call], **extra}) == plain
        refused = {"role": "assistant", "content": "A", "refusal": "no"}
        assert written(telling, refused) == "[content=A;role=assistant;]>"

    def test_no_calls_are_none(self, telling: FakeServer) -> None:
        assert "A" in written(telling, {"role": "assistant", "content": "A", "tool_calls": []})

    @pytest.mark.parametrize(
        ("message", "param", "said"),
        [
            ({"role": "user"}, "messages.1.content", "is missing: only an assistant's tool_calls"),
            ({"role": "user", "content": None}, "messages.1.content", "is missing"),
            ({"role": "assistant", "content": None}, "messages.1.content", "is missing"),
            ({"role": "assistant", "tool_calls": []}, "messages.1.content", "is missing"),
            ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages.1.tool_calls", "the role is user"),
            ({"role": "tool", "content": "a"}, "messages.1.tool_call_id", "goes with role tool"),
            ({"role": "user", "content": "a", "tool_call_id": "x"}, "messages.1.tool_call_id", "the role is user"),
            ({"role": "tool", "tool_call_id": "x"}, "messages.1.content", "is missing"),
            ({"role": "function", "content": "a", "name": "f"}, "messages.1.role", "'function'"),
            ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "messages.1.audio", "None"),
        ],
    )
    def test_what_a_role_lacks_or_may_not_have_is_refused(
        self, telling: FakeServer, message: dict[str, Any], param: str, said: str
    ) -> None:
        told, text = refusal(telling, USER, message)
        assert told == param
        assert said in text

    @pytest.mark.parametrize("arguments", ["{", "[1]", "1", '"a"', "null"])
    def test_arguments_of_an_earlier_call_must_be_an_object(self, telling: FakeServer, arguments: str) -> None:
        call = CALL | {"function": {"name": "f", "arguments": arguments}}
        param, said = refusal(telling, {"role": "assistant", "content": None, "tool_calls": [call]})
        assert param == "messages"
        assert "messages.0.tool_calls.0: the arguments are not" in said

    def test_calls_need_a_template_that_knows_them(self, server: FakeServer) -> None:
        param, said = refusal(server, {"role": "assistant", "content": None, "tool_calls": [CALL]})
        assert (param, "knows no tool calls" in said) == ("messages", True)


class TestTemplateValues:
    def test_they_reach_the_template(self, telling: FakeServer) -> None:
        assert written(telling, USER, chat_template_kwargs={"style": "brief"}).endswith(">brief")
        assert written(telling, USER, reasoning_effort="low").endswith(">(low)")
        values = {"reasoning_effort": "high", "style": 5}
        assert written(telling, USER, chat_template_kwargs=values).endswith(">5(high)")

    @pytest.mark.parametrize("values", [None, {}])
    def test_none_are_none(self, telling: FakeServer, values: Any) -> None:
        assert written(telling, USER, chat_template_kwargs=values).endswith(">")

    @pytest.mark.parametrize(
        "name",
        [
            *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
            *("tokenize", "padding", "return_tensors", "tokenizer_kwargs", "self", "enable_thinking", "message", ""),
        ],
    )
    def test_what_the_server_gives_or_the_template_does_not_read_is_refused(
        self, telling: FakeServer, name: str
    ) -> None:
        param, said = refusal(telling, USER, chat_template_kwargs={name: "x"})
        assert param == "chat_template_kwargs"
        assert name in said

    def test_a_name_that_nobody_can_write_is_refused(self, client: httpx.Client) -> None:
        body = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"\\ud800": 1}}'
        headers = {"Content-Type": "application/json"}
        response = client.post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 400
        assert "surrogate" in error_of(response)["message"]

    def test_an_effort_that_the_template_does_not_read_is_refused(self, server: FakeServer) -> None:
        param, said = refusal(server, USER, reasoning_effort="low")
        assert param == "reasoning_effort"
        assert "does not read it" in said

    @pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
    def test_every_effort_of_openais_clients_is_known(self, telling: FakeServer, effort: str) -> None:
        assert f"({effort})" in written(telling, USER, reasoning_effort=effort)


class TestToolsOfATemplateWithoutThem:
    TOOL = {"type": "function", "function": {"name": "f"}}  # noqa: RUF012

    def test_they_are_refused(self, server: FakeServer) -> None:
        assert refusal(server, USER, tools=[self.TOOL]) == ("tools", "tools: the model's chat template takes none")

    def test_none_of_them_are_no_tools(self, client: httpx.Client) -> None:
        every: list[dict[str, Any]] = [{"tools": []}, {"tools": None}, {"tool_choice": "none"}]
        for fields in [*every, {"tools": [], "tool_choice": "auto"}]:
            answer = client.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 1, **fields})
            assert answer.status_code == 200, fields

    def test_a_forced_call_needs_some(self, client: httpx.Client) -> None:
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            answer = client.post("/v1/chat/completions", json={"messages": [USER], "tool_choice": choice})
            assert error_of(answer)["param"] == "tool_choice"

    def test_with_choice_none_they_are_not_told_and_so_not_refused(self, client: httpx.Client) -> None:
        body = {"messages": [USER], "max_tokens": 1, "tools": [self.TOOL], "tool_choice": "none"}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
