"""The application as a whole: its documentation answers and names every route that is promised."""

from collections.abc import Iterator

import pytest

from tests.serving import FakeServer, fake_server

ROUTES = {
    "/generate": "post",
    "/v1/completions": "post",
    "/v1/chat/completions": "post",
    "/v1/models": "get",
    "/tokenize": "post",
    "/detokenize": "post",
    "/v1/rope/plan": "post",
    "/health": "get",
    "/ready": "get",
    "/metrics": "get",
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def test_the_documentation_page_answers(server: FakeServer) -> None:
    response = server.client.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")


def test_the_schema_names_every_promised_route(server: FakeServer) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert all(method in paths[path] for path, method in ROUTES.items())


def test_the_schema_describes_answers_and_errors_of_generating_routes(server: FakeServer) -> None:
    schema = server.client.get("/openapi.json").json()
    answers = schema["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "404", "429", "500", "503"} <= answers.keys()
    assert {"ChatResponse", "CompletionResponse", "GenerateResponse", "ErrorResponse"} <= schema["components"][
        "schemas"
    ].keys()
