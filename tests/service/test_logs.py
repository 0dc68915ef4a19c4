"""Request ids in and out, and log lines that connect to them without a word of what was said."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.logs import MAX_ID_LENGTH, JsonFormatter, TextFormatter, configure, is_valid_id, request_id
from tests.serving import FakeServer, error_of, fake_server, read_stream

ID = "X-Request-Id"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(max_body_bytes=2000, api_key="k") as running:
        running.client.headers["Authorization"] = "Bearer k"
        yield running


@pytest.fixture
def lines(server: FakeServer) -> Iterator[io.StringIO]:
    """What is logged as JSON; the server is idle before and after."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)
    server.wait_until_idle()


class TestIds:
    @pytest.mark.parametrize("given", ["a", "order 66/7", "~" * MAX_ID_LENGTH])
    def test_a_clients_id_comes_back_and_is_part_of_the_answers_own(self, server: FakeServer, given: str) -> None:
        response = server.client.post("/generate", json={"prompt": "a", "max_tokens": 1}, headers={ID: given})
        assert response.headers.get_list(ID) == [given]
        assert response.json()["id"] == f"gen-{given}"

    @pytest.mark.parametrize("given", ["", "~" * (MAX_ID_LENGTH + 1), "tab\tinside", "caf\u00e9", None])
    def test_any_other_is_replaced_by_a_new_one(self, server: FakeServer, given: str | None) -> None:
        headers = {} if given is None else {ID.encode(): given.encode()}
        answers = [server.client.get("/v1/models", headers=headers) for _ in range(2)]
        ids = {answer.headers[ID] for answer in answers}
        assert len(ids) == 2
        assert given not in ids
        assert all(map(is_valid_id, ids))

    @pytest.mark.parametrize("text", ["\x00", "\x7f", "a\nb", "a\r\nSet-Cookie: b"])
    def test_no_id_can_break_a_line(self, text: str) -> None:
        assert not is_valid_id(text)

    def test_every_answer_has_one(self, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        client, headers = server.client, {ID: "mine"}
        answers = {
            200: client.get("/health", headers=headers),
            400: client.post("/generate", content=b"{", headers=headers),
            401: client.get("/v1/models", headers=headers | {"Authorization": "Bearer other"}),
            404: client.get("/nowhere", headers=headers),
            405: client.get("/generate", headers=headers),
            413: client.post("/generate", content=b" " * 3000, headers=headers),
        }

        def fail(*_: Any) -> None:
            raise ArithmeticError("a fault of the program's own")

        with monkeypatch.context() as patch, server.new_client(headers=client.headers) as other:
            patch.setattr(server.app.state.server.traffic, "ensure_room", fail)
            answers[500] = other.post("/generate", json={"prompt": "a"}, headers=headers)
        assert {status: answer.status_code for status, answer in answers.items()} == {
            status: status for status in answers
        }
        assert {tuple(answer.headers.get_list(ID)) for answer in answers.values()} == {("mine",)}
        assert error_of(answers[500])["code"] == "internal_error"
        with client.stream("POST", "/generate", json={"prompt": "a", "stream": True}, headers=headers) as stream:
            assert stream.headers[ID] == "mine"
            stream.read()


class TestJsonLines:
    def test_a_requests_end_is_a_line_with_its_numbers(self, server: FakeServer, lines: io.StringIO) -> None:
        body = {"prompt": "secret" * 2, "max_tokens": 5, "rope": {"factor": 2}}
        answer = server.client.post("/generate", json=body, headers={ID: "mine"}).json()
        server.wait_until_idle()
        [line] = [line for line in map(json.loads, lines.getvalue().splitlines()) if "finish_reason" in line]
        timings = {name for name in line if name.endswith("_seconds")}
        assert {name: line[name] for name in line.keys() - timings - {"time", "message"}} == {
            **{"level": "info", "logger": "service.engine.engine", "request_id": "gen-mine"},
            **{"prompt_tokens": 12, "completion_tokens": 5, "cached_tokens": 0, "finish_reason": "length"},
            **{"scheme": "yarn", "factor": 2.0, "mode": "static", "rerotations": 0},
        }
        assert timings == {f"{stage}_seconds" for stage in ("queue", "prefill", "decode", "first_token", "total")}
        assert answer["timing"]["total_seconds"] == line["total_seconds"]

    def test_nothing_that_was_said_is_logged(self, server: FakeServer, lines: io.StringIO) -> None:
        secret = "se-cret"
        said = [read_stream(server.client, "/generate", {"prompt": secret, "max_tokens": 9}).text]
        for body in (
            {"prompt": {"text": secret}},
            {"prompt": "a", "stop": {secret: 5}},
            {"prompt": "a", "seed": secret},
            {"prompt": "a", "model": secret},
            {"prompt": "a", "rope": {"scheme": secret}},
        ):
            response = server.client.post("/generate", json=body)
            assert response.status_code in (400, 404)
            assert secret in response.text
        messages = [{"role": "user", "content": "a"}, {"role": secret, "content": secret}]
        assert server.client.post("/v1/chat/completions", json={"messages": messages}).status_code == 400
        server.wait_until_idle()
        assert len(lines.getvalue().splitlines()) >= 7
        assert not any(word in lines.getvalue() for word in (secret, *said))

    def test_a_refusal_names_request_code_and_field(self, server: FakeServer, lines: io.StringIO) -> None:
        server.client.post("/generate", json={"prompt": "a", "top_k": -1}, headers={ID: "mine"})
        server.client.post("/generate", json={"prompt": "a", "x" * 500 + "\nfaked": 1})
        first, second = [
            line for line in map(json.loads, lines.getvalue().splitlines()) if "refused" in line["message"]
        ]
        assert (first["message"], first["request_id"]) == ("refused: invalid_value, 'top_k'", "mine")
        assert len(second["message"]) < 200

    def test_an_exception_stays_on_its_line(self) -> None:
        record = logging.LogRecord("here", logging.ERROR, "", 0, "a %s", ("fault",), None)
        try:
            raise ValueError("two\nlines")
        except ValueError as error:
            record.exc_info = (type(error), error, error.__traceback__)
        [line] = JsonFormatter().format(record).splitlines()
        assert json.loads(line)["message"] == "a fault"
        assert "two\nlines" in json.loads(line)["exception"]


def test_a_line_of_text_ends_in_the_requests_id() -> None:
    record = logging.LogRecord("here", logging.INFO, "", 0, "a message", None, None)
    assert TextFormatter().format(record).endswith("INFO here: a message")
    token = request_id.set("mine")
    assert TextFormatter().format(record).endswith("INFO here: a message [mine]")
    request_id.reset(token)


@pytest.mark.parametrize(("log_format", "kind"), [("text", TextFormatter), ("json", JsonFormatter)])
def test_every_logger_writes_in_the_format_that_is_set(
    monkeypatch: pytest.MonkeyPatch, log_format: Any, kind: type[logging.Formatter]
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: given.append(options))
    monkeypatch.setattr(logging, "captureWarnings", lambda _: None)
    configure("warning", log_format)
    [options] = given
    assert options["level"] == "WARNING"
    assert [type(handler.formatter) for handler in options["handlers"]] == [kind]


def test_a_page_of_another_origin_can_read_the_id() -> None:
    with fake_server(cors_origins="https://a.example") as server:
        response: httpx.Response = server.client.get("/health", headers={"Origin": "https://a.example"})
    assert ID in response.headers["access-control-expose-headers"]
