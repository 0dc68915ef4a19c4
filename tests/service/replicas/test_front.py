"""The front before whole servers in the same process, and before replicas that go away. Without Ray."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from service.app import create_app
from service.errors import NotReadyError, QueueFullError
from service.replicas.asgi import CarriedRequest, answer
from service.replicas.beginning import BeginningReader
from service.replicas.forwarding import ReplicaGoneError
from service.replicas.front import create_front
from service.replicas.placing import Beginning
from tests.serving import DEADLINE, FakeServer, byte_tokenizer, fake_server, wait_until

HEAD: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
STREAM: Message = {**HEAD, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
GONE = ReplicaGoneError("killed")


def body(text: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Local:
    """Replicas that are applications here."""

    def __init__(self, **apps: FastAPI) -> None:
        self.apps = apps
        self.asked: list[tuple[Beginning | None, str]] = []

    @property
    def names(self) -> Sequence[str]:
        return list(self.apps)

    async def ask(
        self, request: CarriedRequest, *, beginning: Beginning | None = None, only: str | None = None
    ) -> AsyncIterator[list[Message]]:
        name = only or self.names[0]
        self.asked.append((beginning, name))
        async for batch in answer(self.apps[name], request):
            yield batch


class Scripted:
    """Replicas that say what is written for each time that they are asked, or raise it."""

    def __init__(self, *scripts: Sequence[list[Message] | Exception]) -> None:
        self._scripts = list(scripts)
        self.names: Sequence[str] = ["one"]
        self.num_asked = 0

    async def ask(
        self, request: CarriedRequest, *, beginning: Beginning | None = None, only: str | None = None
    ) -> AsyncIterator[list[Message]]:
        del request, beginning, only
        self.num_asked += 1
        for said in self._scripts.pop(0):
            if isinstance(said, Exception):
                raise said
            yield said


def reader(server: FakeServer) -> BeginningReader:
    return BeginningReader(server.settings, server.inspected.policy, byte_tokenizer())


async def started(stack: AsyncExitStack, server: FakeServer) -> FastAPI:
    """The application of a fake server on this event loop."""
    app = create_app(server.settings, server.inspected, server.metrics, server._load, server._fail)
    await stack.enter_async_context(app.router.lifespan_context(app))
    while app.state.server.loaded is None:
        await asyncio.sleep(0.005)
    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://front")


def run(work: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
    async def stacked() -> None:
        async with AsyncExitStack() as stack:
            await work(stack)

    asyncio.run(stacked())


def ask_scripted(replicas: Scripted, path: str = "/v1/completions", **settings: Any) -> httpx.Response:
    """What a client hears of scripted replicas."""
    server = fake_server(**settings)
    front = create_front(server.settings, reader(server), replicas)

    async def ask() -> httpx.Response:
        async with client_of(front) as client:
            return await client.post(path, json={"prompt": "abc"}, headers={"origin": "https://a.example"})

    return asyncio.run(ask())


REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/generate", {"json": {"prompt": "abc", "max_tokens": 5}}),
    ("POST", "/v1/completions", {"json": {"prompt": "abc", "max_tokens": 5, "stream": True}}),
    ("POST", "/v1/completions", {"json": {"prompt": "abc", "max_tokens": 5, "unknown": 1}}),
    ("POST", "/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}}),
    ("POST", "/v1/completions", {"content": b"{", "headers": {"content-type": "application/json"}}),
    ("POST", "/tokenize", {"json": {"prompt": "abc"}}),
    ("POST", "/generate", {"json": {"prompt": "x" * 5000}}),
    ("GET", "/v1/models/fake-model", {}),
    ("GET", "/v1/models?unused=1", {}),
    ("GET", "/openapi.json", {}),
    ("GET", "/docs", {}),
    ("GET", "/", {}),
    ("HEAD", "/ready", {}),
    ("GET", "/nothing", {}),
    ("DELETE", "/generate", {}),
    ("POST", "/generate", {"json": {"prompt": "abc", "max_tokens": 5}, "headers": {"origin": "https://a.example"}}),
    ("POST", "/generate", {"json": {"prompt": "abc", "max_tokens": 5}, "headers": {"origin": "https://b.example"}}),
    ("OPTIONS", "/generate", {"headers": {"origin": "https://a.example", "access-control-request-method": "POST"}}),
]


def test_an_answer_is_the_replicas_own() -> None:
    async def compare(stack: AsyncExitStack) -> None:
        server = fake_server(cors_origins="https://a.example")
        app, replica = await started(stack, server), await started(stack, fake_server())
        front = create_front(server.settings, reader(server), Local(one=replica))
        direct, through = [await stack.enter_async_context(client_of(it)) for it in (app, front)]
        for method, path, what in REQUESTS:
            what["headers"] = {**what.get("headers", {}), "X-Request-Id": "own"}
            answers = [await client.request(method, path, **what) for client in (direct, through)]
            assert comparable(answers[0]) == comparable(answers[1]), (method, path)

    def comparable(response: httpx.Response) -> Any:
        text: Any = response.text
        if response.headers.get("content-type") == "application/json" and text:
            text = {name: value for name, value in response.json().items() if name not in ("timing", "created")}
        elif response.headers.get("content-type", "").startswith("text/event-stream"):
            events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
            text = [{**json.loads(event), "created": 0} if event != "[DONE]" else event for event in events]
        headers = [(name, value) for name, value in response.headers.multi_items() if name != "content-length"]
        return response.status_code, sorted(headers), text

    run(compare)


def test_a_request_without_a_valid_key_is_not_looked_at() -> None:
    async def ask(stack: AsyncExitStack) -> None:
        server = fake_server(api_key="right")
        replicas = Local(one=await started(stack, server))
        client = await stack.enter_async_context(client_of(create_front(server.settings, reader(server), replicas)))
        what = {"prompt": "abc" * 10, "max_tokens": 2}
        statuses = [
            (await client.post("/generate", json=what, headers=headers)).status_code
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer right"})
        ]
        assert statuses == [401, 401, 200]
        assert [beginning is None for beginning, _ in replicas.asked] == [True, True, False]

    run(ask)


def test_a_body_that_is_too_large_goes_nowhere() -> None:
    replicas = Scripted()
    response = ask_scripted(replicas, max_body_bytes=10, cors_origins="https://a.example")
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert response.headers["x-request-id"]
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert replicas.num_asked == 0


def test_a_scrape_has_all_replicas_and_the_fronts_own_refusals() -> None:
    async def scrape(stack: AsyncExitStack) -> None:
        servers = [fake_server(max_body_bytes=100), fake_server()]
        replicas = Local(one=await started(stack, servers[0]), two=await started(stack, servers[1]))
        front = create_front(servers[0].settings, reader(servers[0]), replicas)
        client = await stack.enter_async_context(client_of(front))
        await client.post("/generate", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        await client.post("/generate", json={"prompt": "a" * 100})
        text = (await client.get("/metrics")).text
        values = {
            (sample.name, sample.labels["replica"], sample.labels.get("code")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert values["ropewalk_generation_tokens_total", "one", None] == 3
        assert values["ropewalk_generation_tokens_total", "two", None] == 0
        assert values["ropewalk_request_refused_total", "front", "body_too_large"] == 1
        assert ("ropewalk_ready", "front", None) not in values

    run(scrape)


def test_a_scrape_that_replicas_refuse_is_refused() -> None:
    async def scrape(stack: AsyncExitStack) -> None:
        server = fake_server(api_key="right", metrics_need_key=True)
        front = create_front(server.settings, reader(server), Local(one=await started(stack, server)))
        client = await stack.enter_async_context(client_of(front))
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers={"Authorization": "Bearer right"})).status_code == 200

    run(scrape)


def test_a_replica_that_is_gone_is_left_out_of_a_scrape() -> None:
    replicas = Scripted([GONE])
    server = fake_server()
    front = create_front(server.settings, reader(server), replicas)

    async def scrape() -> httpx.Response:
        async with client_of(front) as client:
            return await client.get("/metrics")

    response = asyncio.run(scrape())
    assert response.status_code == 200
    assert 'replica="front"' in response.text


@pytest.mark.parametrize("before", [[], [[]], [[], [HEAD]]], ids=["nothing", "taken", "head"])
def test_what_was_not_answered_is_tried_once_more(before: list[list[Message]]) -> None:
    replicas = Scripted([*before, GONE], [[], [HEAD, body(b"{}")]])
    response = ask_scripted(replicas)
    assert (response.status_code, response.text) == (200, "{}")
    assert replicas.num_asked == 2


def test_what_has_cost_two_replicas_is_not_tried_again() -> None:
    replicas = Scripted([[], GONE], [GONE], [[HEAD, body(b"{}")]])
    response = ask_scripted(replicas)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert replicas.num_asked == 2


@pytest.mark.parametrize(("path", "has_closing"), [("/v1/completions", True), ("/generate", False)])
def test_a_stream_that_has_begun_ends_with_an_error(path: str, has_closing: bool) -> None:
    replicas = Scripted([[STREAM, body(b"data: 1\n\n", more=True)], GONE], [[STREAM, body(b"data: again\n\n")]])
    response = ask_scripted(replicas, path)
    first, error, *closing = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert first == "1"
    assert json.loads(error)["error"]["code"] == "generation_failed"
    assert closing == ["[DONE]"] * has_closing
    assert replicas.num_asked == 1


@pytest.mark.parametrize(("error", "status"), [(QueueFullError("full"), 429), (NotReadyError("none is there"), 503)])
def test_replicas_that_do_not_take_it_are_told_of(error: Exception, status: int) -> None:
    response = ask_scripted(Scripted([error]))
    assert response.status_code == status
    assert response.json()["error"]["message"] == str(error)


def test_a_client_that_goes_away_cancels_the_request() -> None:
    async def leave(stack: AsyncExitStack) -> None:
        server = fake_server()
        app = await started(stack, server)
        front = create_front(server.settings, reader(server), Local(one=app))
        has_left = asyncio.Event()
        sent: list[Message] = []
        request = json.dumps({"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
        messages: list[Message] = [{"type": "http.request", "body": request, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                has_left.set()

        scope = {
            **{"type": "http", "method": "POST", "path": "/generate", "raw_path": b"/generate", "query_string": b""},
            **{"headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http"},
            **{"asgi": {"version": "3.0", "spec_version": "2.3"}, "root_path": "", "client": None, "server": None},
        }
        with server.gate.closed():
            going = asyncio.create_task(front(scope, receive, send))
            await asyncio.to_thread(server.gate.wait_until_reached)
            server.gate._one.set()
            await asyncio.wait_for(going, DEADLINE)
            told = lambda: server.inbox_size > 0 or server.is_idle  # noqa: E731 - short
            await asyncio.to_thread(wait_until, told, "the engine is told")
        await asyncio.to_thread(server.wait_until_idle)
        assert server.metrics.finished.labels("cancelled")._value.get() == 1

    run(leave)
