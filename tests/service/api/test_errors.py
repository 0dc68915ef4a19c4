"""Every error has OpenAI's shape and the right status, and nothing that a client sends makes a 500."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.api.requests import (
    FIELD_NAMES,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    PlanRequest,
    RequestModel,
    ToleratedFields,
)
from tests.serving import MODEL, FakeServer, error_of, fake_server

JSON = {"Content-Type": "application/json"}
ROUTES: dict[str, type[RequestModel]] = {
    "/generate": GenerateRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/rope/plan": PlanRequest,
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"{", id="cut off"),
        pytest.param(b"{'prompt': 'a'}", id="single quotes"),
        pytest.param(b'{"prompt": "a"} x', id="something after"),
        pytest.param(b"\xff\xfe\x00", id="no text"),
        pytest.param(b'{"prompt": "\xff"}', id="no UTF-8"),
    ],
)
def test_what_is_not_json_is_a_400_that_says_so(client: httpx.Client, path: str, content: bytes) -> None:
    response = client.post(path, content=content, headers=JSON)
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", None)
    assert "body" in error["message"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("content", [b"[1]", b'"a"', b"5", b"null", b"true", b""])
def test_a_body_that_is_no_object_is_a_400_that_says_so(client: httpx.Client, path: str, content: bytes) -> None:
    response = client.post(path, content=content, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("the body must be a JSON object")


def test_json_sent_as_a_form_is_refused_with_the_header_that_is_missing(client: httpx.Client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    response = client.post("/generate", content=b'{"prompt": "a"}', headers=form)
    assert response.status_code == 400
    assert "Content-Type: application/json" in error_of(response)["message"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_another_model_is_a_404_that_names_both(client: httpx.Client, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    response = client.post(path, json=prompt | {"model": "gpt-4"})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'gpt-4'" in error["message"]
    assert MODEL in error["message"]


def test_an_unknown_path_is_a_404(client: httpx.Client) -> None:
    response = client.get("/v1/nothing")
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


def test_a_wrong_method_is_a_405_that_says_which_is_right(client: httpx.Client) -> None:
    response = client.get("/generate")
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


CONTENT, UNKNOWN = "messages.0.content", "is not a field of this request"
WISH = "rope: must be an object with scheme, mode, factor, growth, prefix_reuse, it is "


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"rope": "yarn"}, "rope", WISH + "'yarn'"),
        ({"rope": ["yarn"]}, "rope", WISH + "['yarn']"),
        ({"rope": {"factor": "2"}}, "rope.factor", "rope.factor: must be a number, it is '2'"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens: must be an integer, it is '5'"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: must be greater than or equal to 1, it is 0"),
        ({"stream": "x"}, "stream", "stream: must be a boolean (true or false), it is 'x'"),
        ({"prompt": 5}, "prompt", "prompt: must be a string or a list, it is 5"),
        ({"prompt": ""}, "prompt", "prompt: must have at least 1 character, it is ''"),
        ({"prompt": [1, -1]}, "prompt", "prompt: item 1 must be greater than or equal to 0, it is -1"),
        ({"prompt": [1, 2.5]}, "prompt", "prompt: item 1 must be an integer, it is 2.5"),
        ({"stop": ["a", ""]}, "stop", "stop: item 1 must have at least 1 character, it is ''"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias: must be less than or equal to 100, it is 101"),
        ({"max_token": 5}, "max_token", "max_token is not a field of this request: did you mean max_tokens?"),
        (
            {"rope": {"facter": 2}},
            "rope.facter",
            "rope.facter is not a field of this request: did you mean rope.factor?",
        ),
        ({"rope": {"max_token": 2}}, "rope.max_token", "rope.max_token is not a field of this request"),
        ({"message": []}, "message", "message is not a field of this request"),
        ({"seed": 1.5, "stop": 5, "max_token": 1}, "seed", "seed: must be an integer, it is 1.5"),
    ],
)
def test_what_is_wrong_is_said_in_plain_words(
    client: httpx.Client, body: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(client.post("/generate", json={"prompt": "a"} | body))
    assert (error["param"], error["message"]) == (param, message)


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        (5, "messages", "messages: must be a list, it is 5"),
        (["a"], "messages.0", f"messages.0: must be an object with {', '.join(ChatMessage.model_fields)}, it is 'a'"),
        ([{"content": "a"}], "messages.0.role", "messages.0.role is missing"),
        (
            [{"role": "user", "content": "a", "rolle": "a"}],
            "messages.0.rolle",
            "messages.0.rolle is not a field of this request: did you mean messages.0.role?",
        ),
        (
            [{"role": "user", "content": 5}],
            "messages.0.content",
            "messages.0.content: must be a string or a list, it is 5",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages.0.content.0.text",
            "messages.0.content.0.text is missing",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "txet": 5}]}],
            "messages.0.content.0.txet",
            "messages.0.content.0.txet is not a field of this request: did you mean messages.0.content.0.text?",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}],
            "messages.0.content.0.type",
            "messages.0.content.0.type: must be 'text', it is 'image_url'",
        ),
    ],
)
def test_what_is_wrong_within_a_message_is_told_with_its_place(
    client: httpx.Client, messages: Any, param: str, message: str
) -> None:
    error = error_of(client.post("/v1/chat/completions", json={"messages": messages}))
    assert (error["param"], error["message"]) == (param, message)


def test_only_fields_of_the_route_are_proposed(client: httpx.Client) -> None:
    for path, guess in (("/v1/chat/completions", ": did you mean messages?"), ("/v1/completions", "")):
        body = {"messages": [{"role": "user", "content": "a"}]} if guess else {"prompt": "a"}
        error = error_of(client.post(path, json=body | {"mesages": []}))
        assert error["message"] == f"mesages is not a field of this request{guess}"


@pytest.fixture(scope="module")
def small() -> Iterator[FakeServer]:
    with fake_server(max_body_bytes=1000) as running:
        yield running


class TestBodyLimit:
    @pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 413)])
    def test_a_body_may_be_as_long_as_the_limit_and_no_longer(self, small: FakeServer, size: int, status: int) -> None:
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        response = small.client.post("/generate", content=body.ljust(size), headers=JSON)
        assert response.status_code == status
        if status == 413:
            error = error_of(response)
            assert (error["code"], error["message"]) == ("body_too_large", "the body has more than 1000 bytes")

    def test_a_body_of_unknown_length_is_stopped_at_the_limit(self, small: FakeServer) -> None:
        def chunks() -> Iterator[bytes]:
            yield b'{"prompt": "'
            for _ in range(20):
                yield b"x" * 100
            yield b'"}'

        response = small.client.post("/generate", content=chunks(), headers=JSON)
        assert response.status_code == 413
        assert error_of(response)["code"] == "body_too_large"


def test_a_refusal_is_counted_by_its_code(server: FakeServer) -> None:
    def refusals() -> dict[str, float]:
        return {name: value for name, value in server.samples().items() if "request_refused_total" in name}

    before = refusals()
    server.client.post("/generate", json={"prompt": [5] * 300})
    server.client.post("/generate", json={"prompt": "a", "model": "b"})
    after = refusals()
    for code in ("context_length_exceeded", "model_not_found"):
        name = f"ropewalk_request_refused_total{{code={code}}}"
        assert after[name] == before.get(name, 0) + 1


class TestInvariant8:
    """No input, however bad, is answered 500."""

    @pytest.mark.parametrize("path", ROUTES)
    @pytest.mark.parametrize(
        "value",
        [
            pytest.param("9" * 4300, id="the longest number that Python reads"),
            pytest.param("9" * 5000, id="a longer number"),
            pytest.param("-" + "9" * 4300, id="the same below zero"),
            pytest.param("1e999", id="infinite"),
            pytest.param("NaN", id="not a number"),
            pytest.param("5e-324", id="next to zero"),
            pytest.param(r'"\ud800"', id="half a character"),
            pytest.param(r'"\u0000"', id="a zero byte"),
            pytest.param("[" * 900 + "]" * 900, id="deep"),
            pytest.param("[" * 100_000 + "]" * 100_000, id="deeper than Python goes"),
            pytest.param('{"a":' * 990 + "1" + "}" * 990, id="deep objects"),
        ],
    )
    def test_hostile_values(self, client: httpx.Client, path: str, value: str) -> None:
        ordinary = '"messages": [{"role": "user", "content": "a"}]' if "chat" in path else '"prompt": "a"'
        for field in sorted(FIELD_NAMES):
            for body in (f'{{{ordinary}, "{field}": {value}}}', f'{{{ordinary}, "rope": {{"{field}": {value}}}}}'):
                assert client.post(path, content=body, headers=JSON).status_code < 500, body[:200]
        named = f"{{{ordinary}, {value if value.startswith(chr(34)) else json.dumps(value[:50])}: 1}}"
        assert client.post(path, content=named, headers=JSON).status_code == 400

    @pytest.mark.parametrize("path", ROUTES)
    def test_random_bodies(self, shared_server: FakeServer, path: str) -> None:
        statuses = set()

        @settings(deadline=None, max_examples=250, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(body=bodies(path))
        def never_a_500(body: dict[str, Any]) -> None:
            response = shared_server.client.post(path, json=body)
            statuses.add(response.status_code)
            assert response.status_code in (200, 400, 404, 408)
            if response.status_code != 200:
                error_of(response)

        never_a_500()
        assert statuses >= {200, 400}
        shared_server.wait_until_idle()


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with any of the route's fields, each with a likely value or with any JSON at all."""
    small = st.integers(-2, 300) | st.integers()
    floats = st.floats(allow_nan=False, allow_infinity=False)
    text = st.text(max_size=20)
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | floats | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
        max_leaves=5,
    )
    types = st.sampled_from(["object", "string", "integer"])
    schemas = st.fixed_dictionaries({"type": types}) | st.dictionaries(st.just("type") | text, anything, max_size=3)
    content = text | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": text}), max_size=3)
    function = st.fixed_dictionaries({"name": st.sampled_from(["f", "g"]) | text}, optional={"parameters": schemas})
    tools = st.fixed_dictionaries({"type": st.just("function"), "function": function})
    likely: dict[str, st.SearchStrategy[Any]] = {
        "model": st.just(MODEL),
        "prompt": text | st.lists(st.integers(-1, 130), max_size=300) | st.lists(text, max_size=3),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["system", "developer", "user"]), "content": content}),
            max_size=4,
        ),
        "prompt_tokens": small,
        "max_tokens": small,
        "max_completion_tokens": small,
        "min_tokens": small,
        "temperature": floats | st.floats(0, 2),
        "top_p": floats | st.floats(0, 1),
        "min_p": floats | st.floats(0, 1),
        "top_k": small,
        "seed": st.integers(),
        "stop": text | st.lists(text, max_size=20),
        "ignore_eos": st.booleans(),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "logit_bias": st.dictionaries(st.integers(-1, 130).map(str), st.floats(-100, 100)),
        "logprobs": st.booleans() | st.none() | small,
        "top_logprobs": small,
        "response_format": st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "json_object", "json_schema"]) | text},
            optional={"json_schema": st.fixed_dictionaries({"name": text, "schema": schemas})},
        ),
        "structured_outputs": st.fixed_dictionaries(
            {}, optional={"json": schemas, "regex": text, "choice": st.lists(text, max_size=3), "grammar": text}
        ),
        "n": st.just(1) | small,
        "stream": st.booleans() | st.none(),
        "timeout": st.floats(100, 1e9) | floats,
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans() | st.none()}),
        "stop_token_ids": st.lists(st.integers(-1, 130), max_size=3),
        "prompt_logprobs": small,
        "echo": st.booleans(),
        "best_of": small,
        "suffix": st.none(),
        "tools": st.lists(tools, max_size=2),
        "tool_choice": st.sampled_from(["none", "auto", "required"])
        | st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries({"name": text})}),
        "parallel_tool_calls": st.booleans(),
        "modalities": st.just(["text"]),
        "chat_template_kwargs": st.dictionaries(
            st.sampled_from(["messages", "bos_token", "tokenize"]) | text, anything
        ),
        "reasoning_effort": st.sampled_from(["none", "low", "high"]),
        **dict.fromkeys(ToleratedFields.model_fields, text | st.dictionaries(text, text) | st.booleans()),
        "rope": st.fixed_dictionaries(
            {},
            optional={
                "scheme": st.sampled_from(["yarn", "linear", "ntk", "dynamic", "default"]) | text,
                "mode": st.sampled_from(["native", "static", "dynamic"]) | text,
                "factor": st.sampled_from([1, 1.25, 1.5, 2, 2.5, 3, 4]) | floats,
                "growth": st.just("stop") | text,
            },
        ),
        "user": text,
    }
    fields = ROUTES[path].model_fields
    assert fields.keys() <= likely.keys()
    needed = {name for name, field in fields.items() if field.is_required()}
    return st.one_of(
        st.fixed_dictionaries(
            {name: likely[name] for name in needed},
            optional={name: likely[name] for name in fields.keys() - needed},
        ),
        st.fixed_dictionaries({}, optional={name: likely[name] | anything for name in fields}),
        st.dictionaries(st.sampled_from(sorted(FIELD_NAMES)) | text, anything, max_size=4),
    )
