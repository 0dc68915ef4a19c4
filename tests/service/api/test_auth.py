"""With a key set, every path is closed but those that probes and scrapers ask."""

from collections.abc import Iterator

import httpx
import pytest
from openai import AuthenticationError

from tests.serving import MODEL, FakeServer, error_of, fake_server, read_stream

KEY = "s\u00e9same-1"
CLOSED = [
    ("POST", "/generate"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/rope/plan"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake-model"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/no/such/path"),
    ("GET", "/metrics/"),
    ("GET", "/health/../v1/models"),
]


@pytest.fixture(scope="module")
def locked() -> Iterator[FakeServer]:
    with fake_server(api_key=KEY) as running:
        yield running


def bearer(value: str) -> dict[bytes, bytes]:
    return {b"Authorization": value.encode()}


@pytest.mark.parametrize(("method", "path"), CLOSED)
@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="no key"),
        pytest.param(bearer("Bearer wrong"), id="another key"),
        pytest.param(bearer(f"Bearer {KEY}x"), id="a longer key"),
        pytest.param(bearer(f"Bearer {KEY[:-1]}"), id="a shorter key"),
        pytest.param(bearer("Bearer"), id="an empty key"),
        pytest.param(bearer(KEY), id="the key without Bearer"),
        pytest.param(bearer(f"Basic {KEY}"), id="another method"),
    ],
)
def test_without_the_key_every_other_path_is_a_401_in_openais_shape(
    locked: FakeServer, method: str, path: str, headers: dict[bytes, bytes]
) -> None:
    response = locked.client.request(method, path, json={"prompt": "a"}, headers=headers)
    error = error_of(response)
    assert response.status_code == 401
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert KEY not in response.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_and_scrapers_need_no_key(locked: FakeServer, path: str) -> None:
    assert locked.client.get(path).status_code == 200


def test_every_route_is_in_these_tests(locked: FakeServer) -> None:
    with locked.new_client(headers=bearer(f"Bearer {KEY}")) as client:
        routes = client.get("/openapi.json").json()["paths"]
    assert {route.replace("{name}", MODEL) for route in routes} <= {path for _, path in CLOSED} | {
        "/health",
        "/ready",
        "/metrics",
    }


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_with_the_key_requests_are_served(locked: FakeServer, scheme: str) -> None:
    with locked.new_client(headers=bearer(f"{scheme} {KEY}")) as client:
        assert client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert read_stream(client, "/v1/completions", {"prompt": "a", "max_tokens": 2}).done


def test_openais_client_is_let_in_with_the_key_and_knows_the_refusal() -> None:
    with fake_server(api_key="plain") as server:
        with server.openai("plain") as openai:
            assert openai.completions.create(model="fake-model", prompt="a", max_tokens=2).choices[0].text
        with server.openai("wrong") as openai, pytest.raises(AuthenticationError) as refusal:
            openai.completions.create(model="fake-model", prompt="a")
        assert refusal.value.code == "invalid_api_key"


def test_without_a_key_set_nothing_is_asked(client: httpx.Client) -> None:
    assert client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200
