"""Both clients, which promise the same: what they send, what they give back, when they try again."""

import json
import subprocess
import sys
from email.utils import formatdate
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from service.api.responses import (
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    GenerateChunk,
    GenerateResponse,
    ModelCard,
    ModelList,
    PlanResponse,
    TokenizeResponse,
)
from service.client import ApiError, AsyncClient, BrokenAnswerError, Client, UnreachableError, calls
from service.client.calls import Status
from tests.service.client.answers import CARD, CHAT, GENERATE, GENERATE_CHUNK, PLAN, USAGE, chat_chunk, completion
from tests.service.client.scripted import WALL, AsyncDriver, BlockingDriver, Driver, Pieces, Script, Time, events

PROMPT: dict[str, Any] = {"prompt": "The capital", "max_tokens": 2, "rope": {"factor": 2}}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(params=[BlockingDriver(), AsyncDriver()], ids=["blocking", "asyncio"])
def driver(request: pytest.FixtureRequest) -> Driver:
    found: Driver = request.param
    return found


@pytest.fixture
def time() -> Time:
    return Time()


def ok(body: Any) -> httpx.Response:
    return httpx.Response(200, json=body)


def refused(status: int = 429, **headers: str) -> httpx.Response:
    body = {"error": {"message": "the queue is full", "type": "t", "param": None, "code": "queue_full"}}
    return httpx.Response(status, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


def streamed(*pieces: bytes | Exception) -> httpx.Response:
    return httpx.Response(200, stream=Pieces(pieces), headers={"X-Request-Id": "from-server"})


@pytest.mark.parametrize(
    ("method", "given", "fields", "sent", "body", "answer", "kind"),
    [
        ("generate", (), PROMPT, "POST /generate", PROMPT, GENERATE, GenerateResponse),
        (
            "complete",
            (),
            PROMPT,
            "POST /v1/completions",
            PROMPT,
            completion("x", "stop", usage=USAGE),
            CompletionResponse,
        ),
        ("chat", (), MESSAGES, "POST /v1/chat/completions", MESSAGES, CHAT, ChatResponse),
        ("plan", (), {"prompt_tokens": 9}, "POST /v1/rope/plan", {"prompt_tokens": 9}, PLAN, PlanResponse),
        (
            *("tokenize", (), {"prompt": "hé", "add_special_tokens": False}, "POST /tokenize"),
            {"prompt": "hé", "add_special_tokens": False},
            {"tokens": [1], "count": 1, "max_model_len": 9, "new": 1},
            TokenizeResponse,
        ),
        ("detokenize", ([1, 2],), {}, "POST /detokenize", {"tokens": [1, 2]}, {"prompt": "ab"}, DetokenizeResponse),
        ("models", (), {}, "GET /v1/models", None, {"object": "list", "data": [CARD]}, ModelList),
        ("model", ("org/m ?",), {}, "GET /v1/models/org%2Fm%20%3F", None, CARD, ModelCard),
        ("health", (), {}, "GET /health", None, {"status": "alive"}, Status),
        ("ready", (), {}, "GET /ready", None, {"status": "ready", "model": "m"}, Status),
    ],
)
def test_each_method_asks_its_route_and_reads_what_it_knows_of_the_answer(
    driver: Driver,
    time: Time,
    method: str,
    given: Any,
    fields: Any,
    sent: str,
    body: Any,
    answer: Any,
    kind: type[BaseModel],
) -> None:
    script = Script(ok(answer))
    value = driver.call(script, time, method, *given, **fields)
    (request,) = script.requests
    assert f"{request.method} {request.url.raw_path.decode()}" == sent
    assert (json.loads(request.content) if request.content else None) == body
    assert type(value) is kind
    assert not hasattr(value, "new")
    told = value.model_dump(exclude_none=True)
    assert told.items() <= {**answer, **told}.items()
    assert all(told[name] == answer[name] for name in told.keys() & answer if not isinstance(answer[name], dict | list))


def test_metrics_are_text(driver: Driver, time: Time) -> None:
    assert driver.call(Script(httpx.Response(200, content=b"a_total 1\n")), time, "metrics") == "a_total 1\n"


def test_the_key_and_the_request_id_are_sent_and_the_answers_id_comes_back(driver: Driver, time: Time) -> None:
    answer = httpx.Response(200, json={"prompt": "ab"}, headers={"X-Request-Id": "theirs"})
    script = Script(answer, ok(GENERATE))
    reply = driver.call(script, time, "send", calls.detokenize([1]), request_id="mine", options={"api_key": "secret"})
    assert (reply.value.prompt, reply.request_id) == ("ab", "theirs")
    assert script.requests[0].headers["X-Request-Id"] == "mine"
    assert script.requests[0].headers["Authorization"] == "Bearer secret"
    driver.call(script, time, "generate", request_id="other", prompt="a")
    assert script.requests[1].headers["X-Request-Id"] == "other"
    assert "Authorization" not in script.requests[1].headers
    assert script.bodies[1] == {"prompt": "a"}


@pytest.mark.parametrize(
    ("method", "fields", "chunks", "kinds"),
    [
        ("stream_generate", PROMPT, [GENERATE_CHUNK, GENERATE], [GenerateChunk, GenerateResponse]),
        ("stream_complete", PROMPT, [completion("a"), completion("b"), "[DONE]"], [CompletionResponse] * 2),
        ("stream_chat", MESSAGES, [chat_chunk("a"), chat_chunk("b"), "[DONE]"], [ChatChunk] * 2),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_streams_are_read_however_the_network_cuts_them(
    driver: Driver, time: Time, method: str, fields: Any, chunks: list[Any], kinds: list[type], size: int
) -> None:
    data = b": keep-alive\n\n" + events(*chunks)
    script = Script(streamed(*(data[start : start + size] for start in range(0, len(data), size))))
    read: list[Any] = []
    assert driver.stream(script, time, method, read, **fields) == "from-server"
    assert [type(chunk) for chunk in read] == kinds
    assert script.bodies == [{**fields, "stream": True}]


def test_characters_cut_between_pieces_are_whole(driver: Driver, time: Time) -> None:
    data = events(json.dumps(completion("naïve 🧶"), ensure_ascii=False), "[DONE]")
    read: list[Any] = []
    driver.stream(Script(streamed(*(bytes([byte]) for byte in data))), time, "stream_complete", read, **PROMPT)
    assert read[0].choices[0].text == "naïve 🧶"


def test_an_error_event_is_raised_after_what_came_before_it(driver: Driver, time: Time) -> None:
    error = {
        "error": {"message": "generation failed", "type": "server_error", "param": None, "code": "generation_failed"}
    }
    read: list[Any] = []
    with pytest.raises(ApiError) as raised:
        driver.stream(
            Script(streamed(events(completion("a"), error, "[DONE]"))), time, "stream_complete", read, **PROMPT
        )
    assert [chunk.choices[0].text for chunk in read] == ["a"]
    told = raised.value
    assert (told.status, told.code, told.message) == (200, "generation_failed", "generation failed")
    assert told.request_id == "from-server"


def test_what_follows_the_end_of_a_stream_is_no_part_of_it(driver: Driver, time: Time) -> None:
    read: list[Any] = []
    pieces = events(completion("a"), "[DONE]", completion("b"))
    driver.stream(Script(streamed(pieces)), time, "stream_complete", read, **PROMPT)
    assert [chunk.choices[0].text for chunk in read] == ["a"]


def test_the_word_error_in_a_text_is_no_error(driver: Driver, time: Time) -> None:
    read: list[Any] = []
    text = '{"error": "no"}'
    driver.stream(Script(streamed(events(completion(text), "[DONE]"))), time, "stream_complete", read, **PROMPT)
    assert read[0].choices[0].text == text


@pytest.mark.parametrize(
    ("method", "fields", "pieces", "before"),
    [
        ("stream_complete", PROMPT, [events(completion("a"))], 1),
        ("stream_chat", MESSAGES, [events(chat_chunk("a")), httpx.ReadError("reset")], 1),
        ("stream_generate", PROMPT, [events(GENERATE_CHUNK)], 1),
        ("stream_generate", PROMPT, [b"<html>busy</html>"], 0),
        ("stream_generate", PROMPT, [events("{}")], 0),
        ("stream_generate", PROMPT, [events("no JSON")], 0),
        ("stream_generate", PROMPT, [httpx.ReadTimeout("")], 0),
    ],
)
def test_a_stream_that_breaks_is_neither_taken_for_whole_nor_tried_again(
    driver: Driver, time: Time, method: str, fields: Any, pieces: list[Any], before: int
) -> None:
    script = Script(streamed(*pieces), ok(GENERATE))
    read: list[Any] = []
    with pytest.raises(BrokenAnswerError):
        driver.stream(script, time, method, read, **fields)
    assert len(read) == before
    assert len(script.requests) == 1


def test_leaving_a_stream_early_closes_it(driver: Driver, time: Time) -> None:
    body = Pieces([events(completion(letter)) for letter in "abcdef"])
    read: list[Any] = []
    driver.stream(Script(httpx.Response(200, stream=body)), time, "stream_complete", read, take=2, **PROMPT)
    assert len(read) == 2
    assert body.is_closed
    assert body.taken < 6


def test_a_stream_is_tried_again_before_it_begins(driver: Driver, time: Time) -> None:
    script = Script(refused(503, retry_after="4"), streamed(events(completion("a"), "[DONE]")))
    read: list[Any] = []
    driver.stream(script, time, "stream_complete", read, **PROMPT)
    assert (len(read), time.waits) == (1, [4])


def test_retry_after_is_waited_for_in_both_its_forms(driver: Driver, time: Time) -> None:
    dated = {"retry_after": formatdate(WALL + 20, usegmt=True)}
    both_dated = {"retry_after": formatdate(500, usegmt=True), "date": formatdate(497, usegmt=True)}
    script = Script(refused(retry_after="11"), refused(503, **dated), refused(503, **both_dated), ok(GENERATE))
    value = driver.call(script, time, "generate", **PROMPT, options={"retries": 3})
    assert value.text == " Paris"
    assert time.waits == [11, 9, 3]  # of the 20 seconds 11 have passed
    assert script.bodies == [PROMPT] * 4


def test_a_connection_that_fails_is_tried_again(driver: Driver, time: Time) -> None:
    script = Script(httpx.ConnectError("refused"), httpx.ConnectTimeout("slow"), ok(GENERATE))
    assert driver.call(script, time, "generate", **PROMPT).text == " Paris"
    assert time.waits == [0.375, 0.75]


def test_tries_end_with_the_last_error(driver: Driver, time: Time) -> None:
    script = Script(refused(), httpx.ConnectError("refused"), refused(503))
    with pytest.raises(ApiError) as raised:
        driver.call(script, time, "generate", **PROMPT)
    assert raised.value.status == 503
    assert script.is_done
    with pytest.raises(UnreachableError):
        driver.call(Script(httpx.ConnectError("refused")), time, "generate", **PROMPT, options={"retries": 0})


@pytest.mark.parametrize("failure", [httpx.ReadError("reset"), httpx.ReadTimeout(""), httpx.RemoteProtocolError("eh")])
def test_what_may_have_been_done_is_not_tried_again(driver: Driver, time: Time, failure: Exception) -> None:
    script = Script(failure, ok(GENERATE))
    with pytest.raises(BrokenAnswerError):
        driver.call(script, time, "generate", **PROMPT)
    assert len(script.requests) == 1


def test_an_answer_that_breaks_off_is_not_tried_again(driver: Driver, time: Time) -> None:
    body = Pieces([b'{"id"', httpx.ReadError("reset")])
    with pytest.raises(BrokenAnswerError):
        driver.call(Script(httpx.Response(200, stream=body), ok(GENERATE)), time, "generate", **PROMPT)
    assert body.is_closed


@pytest.mark.parametrize("method", ["health", "ready"])
def test_probes_are_not_tried_again(driver: Driver, time: Time, method: str) -> None:
    with pytest.raises(ApiError) as raised:
        driver.call(Script(refused(503, retry_after="1"), ok({"status": "ready"})), time, method)
    assert (raised.value.status, raised.value.code, raised.value.retry_after) == (503, "queue_full", 1)
    assert time.waits == []


@pytest.mark.parametrize("content", [b"<html>hello</html>", b"{}", b"[]", b"\xff"])
def test_an_answer_of_something_else_is_no_answer(driver: Driver, time: Time, content: bytes) -> None:
    with pytest.raises(BrokenAnswerError, match="/generate"):
        driver.call(Script(httpx.Response(200, content=content)), time, "generate", **PROMPT)


@pytest.mark.parametrize(
    ("status", "content", "expected"),
    [
        (400, b'{"error": {"message": "m", "param": "n", "code": "c"}}', ("m", "n", "c")),
        (400, b'{"error": {"message": "m", "code": 400}}', ("m", None, "400")),
        (400, b'{"error": "m"}', ("m", None, None)),
        (422, b'{"detail": "m"}', ("m", None, None)),
        (502, b"<html>\n bad   gateway</html>", ("<html> bad gateway</html>", None, None)),
        (500, b"x" * 1000, ("x" * 200 + "...", None, None)),
        (500, b"[1]", ("[1]", None, None)),
        (500, b"", ("the server gave no reason", None, None)),
    ],
)
def test_errors_of_any_server_are_told(
    driver: Driver, time: Time, status: int, content: bytes, expected: tuple[str, str | None, str | None]
) -> None:
    answer = httpx.Response(status, content=content, headers={"X-Request-Id": "theirs"})
    with pytest.raises(ApiError) as raised:
        driver.call(Script(answer), time, "generate", **PROMPT)
    told = raised.value
    assert (told.message, told.param, told.code) == expected
    assert (told.status, told.request_id) == (status, "theirs")
    assert str(told).startswith(str(status))
    assert "\n" not in str(told)


@pytest.mark.parametrize("url", ["http://h.test", "http://h.test/", "http://h.test/v1", "http://h.test/v1/"])
def test_an_address_may_end_in_v1(url: str) -> None:
    script = Script(ok({"object": "list", "data": []}))
    with Client(url, transport=script) as client:
        client.models()
    assert str(script.requests[0].url) == "http://h.test/v1/models"


@pytest.mark.parametrize("url", ["h.test:8000", "localhost", "", "ftp://h.test", "http://", "http://h.test:port"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_what_is_no_address_is_refused_at_once(url: str, kind: type[Client] | type[AsyncClient]) -> None:
    with pytest.raises(ValueError, match="is no address"):
        kind(url)


@pytest.mark.parametrize("module", ["service.client", "service.commands.bench"])
def test_torch_is_not_imported(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
