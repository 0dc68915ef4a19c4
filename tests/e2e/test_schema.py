"""The server against its own OpenAPI document: what it says is what is sent, whatever comes in.

Schemathesis makes the requests, some that fit the document and some that do not, at the limits of each field and at
random, the same ones each time. It runs as the program that it is, in a process of its own. One of its checks is left
out: that what fits the document is accepted. Fields that exclude each other, and lengths in tokens, are beyond JSON
Schema.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.serving import DEADLINE, MODEL, FakeServer, error_of, fake_server

GENERATING = {"/generate", "/v1/completions", "/v1/chat/completions"}
OF_A_BODY = {400, 408, 413, 500, 503}
STATUSES = {
    **{("post", path): {200, 404, 429} | OF_A_BODY for path in GENERATING},
    **{("post", path): {200} | OF_A_BODY for path in ("/tokenize", "/detokenize", "/v1/rope/plan")},
    ("get", "/v1/models"): {200, 500},
    ("get", "/v1/models/{name}"): {200, 404, 500},
    ("get", "/health"): {200, 500, 503},
    ("get", "/ready"): {200, 500, 503},
    ("get", "/metrics"): {200, 500},
}
"""What each route can answer on a server without keys."""
KEY = "a-key"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running
        running.wait_until_idle()
        assert running.client.get("/health").status_code == 200


@pytest.fixture
def server_with_key() -> Iterator[FakeServer]:
    with fake_server(api_key=KEY) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running
        running.wait_until_idle()


def schemathesis(server: FakeServer, folder: Path, *options: str) -> str:
    """Run it from an empty folder, where it finds no settings of its own; its report, once it has found nothing."""
    program = Path(sys.executable).parent / "schemathesis"
    command = [str(program), "run", f"{server.url}/openapi.json", "--generation-deterministic", "--no-color"]
    environment = os.environ | {"NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=5 * DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def openapi(server: FakeServer) -> dict[str, Any]:
    document: dict[str, Any] = server.client.get("/openapi.json").json()
    return document


def operations(document: dict[str, Any]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield (method, path), operation


class TestAnswers:
    def test_to_whatever_is_sent_conform_to_the_document(self, server: FakeServer, tmp_path: Path) -> None:
        options = ("--phases", "coverage,fuzzing", "--max-examples", "10", "--continue-on-failure")
        report = schemathesis(server, tmp_path, *options, "--exclude-checks", "positive_data_acceptance")
        assert f"Tested: {len(STATUSES)}" in report
        samples = server.samples()
        assert samples["ropewalk_step_failures_total"] == 0
        assert samples["ropewalk_request_success_total{finished_reason=error}"] == 0
        assert samples["ropewalk_request_success_total{finished_reason=length}"] > 30  # it came further than the door
        assert samples["ropewalk_request_refused_total{code=internal_error}"] == 0

    def test_are_401_without_the_key_wherever_the_document_asks_for_one(self, server_with_key: FakeServer) -> None:
        document = openapi(server_with_key)
        for (method, path), operation in operations(document):
            for given in ("", "Bearer wrong", f"Basic {KEY}"):
                answer = server_with_key.client.request(method, path, headers={"Authorization": given})
                assert (answer.status_code == 401) == ("security" in operation), path
                if answer.status_code == 401:
                    error_of(answer)
                    assert answer.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("path", sorted(GENERATING))
    @pytest.mark.parametrize("fails", [False, True])
    def test_in_streams_are_events_of_the_document(self, server: FakeServer, path: str, fails: bool) -> None:
        document = openapi(server)
        content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        validator = jsonschema.Draft202012Validator({**document, **content["itemSchema"]})
        shape = content["itemSchema"]["properties"]["data"]
        [shape] = [each for each in shape.get("anyOf", [shape]) if "contentSchema" in each]
        of_json = jsonschema.Draft202012Validator({**document, **shape["contentSchema"]})
        server.gate.fault = ValueError("broken") if fails else None
        prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
        usage = {} if path == "/generate" else {"stream_options": {"include_usage": True}, "n": 2}
        logprobs = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}
        answer = server.client.post(path, json={**prompt, **usage, **logprobs, "max_tokens": 4, "stream": True})
        events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
        assert len(events) > (0 if fails else 4)
        for event in events:
            validator.validate({"data": event})
            if event != "[DONE]":
                of_json.validate(json.loads(event))
        assert ("error" in json.loads(events[-2 if path != "/generate" else -1])) == fails
        server.gate.fault = None
        assert server.client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200

    def test_of_a_broken_request_have_the_headers_of_the_document(self, server: FakeServer) -> None:
        answer = server.client.post("/generate", json={"prompt": 1}, headers={"X-Request-Id": "mine"})
        documented = openapi(server)["paths"]["/generate"]["post"]["responses"]["400"]["headers"]
        assert list(documented) == ["X-Request-Id"]
        assert answer.headers["x-request-id"] == "mine"


class TestDocument:
    def test_names_every_status_of_every_route_and_no_other(self, server: FakeServer) -> None:
        named = {name: {*map(int, operation["responses"])} for name, operation in operations(openapi(server))}
        assert named == STATUSES

    def test_describes_errors_in_the_shape_they_have(self, server: FakeServer) -> None:
        for name, operation in operations(openapi(server)):
            for status, answer in operation["responses"].items():
                assert answer["description"], (name, status)
                if status >= "400":
                    assert answer["content"] == {
                        "application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}
                    }, (name, status)

    def test_describes_every_field_of_every_request(self, server: FakeServer) -> None:
        document = openapi(server)
        schemas = document["components"]["schemas"]

        def check(schema: Any, name: str) -> None:
            """Every property below a schema; each named schema once."""
            if isinstance(schema, list):
                for part in schema:
                    check(part, name)
            if not isinstance(schema, dict):
                return
            if (reference := schema.get("$ref", "").rpartition("/")[2]) and reference not in seen:
                seen.add(reference)
                check(schemas[reference], reference)
            for field, value in schema.get("properties", {}).items():
                assert value.get("description"), f"{name}.{field}"
                check(value, f"{name}.{field}")
            for key in ("anyOf", "items", "additionalProperties"):
                check(schema.get(key), name)

        seen: set[str] = set()
        for (_, path), operation in operations(document):
            if "requestBody" in operation:
                check(operation["requestBody"]["content"]["application/json"]["schema"], path)
        assert {"GenerateRequest", "ChatRequest", "ChatMessage", "RopeWishFields", "FunctionDefinition"} <= seen

    def test_refers_only_to_what_it_has(self, server: FakeServer) -> None:
        text = json.dumps(document := openapi(server))
        schemas = document["components"]["schemas"]
        referred = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
        assert referred == set(schemas)
        assert "HTTPValidationError" not in schemas

    def test_names_this_servers_limits(self) -> None:
        limits: dict[str, Any] = {
            "max_output_tokens": 77,
            "max_choices": 5,
            "max_stop_strings": 3,
            "max_stop_length": 9,
        }
        others: dict[str, Any] = {
            "max_body_bytes": 54321,
            "max_queued": 6,
            "request_timeout_seconds": 12.5,
            "max_prompt_tokens": 66,
        }
        with fake_server(**limits, **others) as server:
            document = openapi(server)
        fields = document["components"]["schemas"]["ChatRequest"]["properties"]
        kinds = {name: {kind["type"]: kind for kind in fields[name]["anyOf"]} for name in ("stop", "n", "max_tokens")}
        assert kinds["max_tokens"]["integer"]["maximum"] == 77
        assert kinds["n"]["integer"]["maximum"] == 5
        assert kinds["stop"]["array"]["maxItems"] == 3
        assert kinds["stop"]["array"]["items"]["maxLength"] == kinds["stop"]["string"]["maxLength"] == 9
        for name, value in {**limits, **others, "max_queued_tokens": "no limit", "max_model_len": 256}.items():
            assert f"- {name}: {value}, " in document["info"]["description"]

    def test_names_the_schemes_that_requests_can_ask_for(self, server: FakeServer) -> None:
        document = openapi(server)
        scheme = document["components"]["schemas"]["RopeWishFields"]["properties"]["scheme"]["anyOf"]
        [allowed] = [kind["enum"] for kind in scheme if kind["type"] == "string"]
        assert set(allowed) == set(server.client.get(f"/v1/models/{MODEL}").json()["rope_schemes"])

    def test_asks_for_a_key_where_the_server_does(self, server: FakeServer, server_with_key: FakeServer) -> None:
        without, document = openapi(server), openapi(server_with_key)
        assert "securitySchemes" not in without["components"]
        assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
        closed = {name[1] for name, operation in operations(document) if operation.get("security") == [{"bearer": []}]}
        assert {path for _, path in STATUSES} - closed == {"/health", "/ready", "/metrics"}
        for name, operation in operations(document):
            expected = STATUSES[name] | ({401} if name[1] in closed else set())
            assert {*map(int, operation["responses"])} == expected
