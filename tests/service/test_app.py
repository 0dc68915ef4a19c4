"""The application as a whole: its documentation answers and names every route that is promised."""

from collections.abc import Iterator

import httpx
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


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


class TestOrigins:
    def ask(self, server: FakeServer, origin: str, *, first: bool) -> httpx.Response:
        """What a browser is told about a page of an origin: before the request, or with its answer."""
        headers = {"Origin": origin} | (PREFLIGHT if first else {"Authorization": "Bearer k"})
        return server.client.request("OPTIONS" if first else "GET", "/v1/models", headers=headers)

    def test_none_is_allowed_unless_set(self, server: FakeServer) -> None:
        assert self.ask(server, "https://a.example", first=True).status_code == 405
        assert "access-control-allow-origin" not in self.ask(server, "https://a.example", first=False).headers

    @pytest.mark.parametrize("first", [True, False])
    def test_those_that_are_set_are_allowed_and_no_others(self, first: bool) -> None:
        with fake_server(cors_origins="https://a.example, http://b.example:3000", api_key="k") as locked:
            for origin in ("https://a.example", "http://b.example:3000"):
                answer = self.ask(locked, origin, first=first)
                assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
            other = self.ask(locked, "https://c.example", first=first)
            assert "access-control-allow-origin" not in other.headers

    def test_a_page_needs_the_key_all_the_same(self) -> None:
        with fake_server(cors_origins="*", api_key="k") as locked:
            answer = locked.client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "*")
