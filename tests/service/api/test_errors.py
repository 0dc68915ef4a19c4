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
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    PlanRequest,
    RequestModel,
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
    likely: dict[str, st.SearchStrategy[Any]] = {
        "model": st.just(MODEL),
        "prompt": text | st.lists(st.integers(-1, 130), max_size=300),
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
