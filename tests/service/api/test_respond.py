"""What happens between admission and the last byte: silence, clients that go away, an engine that fails or stops."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from openai import APIError, InternalServerError
from starlette.types import Message

from tests.serving import EventStream, FakeServer, error_of, fake_server, read_stream, wait_until

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
LONG = 60
"""So many tokens fit the native length after the prompts here."""


def body(path: str, max_tokens: int = LONG, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    return prompt | {"max_tokens": max_tokens} | fields


def ended(server: FakeServer, reason: str) -> float:
    return server.samples()[f"ropewalk_request_success_total{{finished_reason={reason}}}"]


def admitted(server: FakeServer) -> float:
    return sum(value for name, value in server.samples().items() if name.startswith("ropewalk_request_plan_total"))


class TestKeepAlive:
    @pytest.mark.parametrize("path", PATHS)
    def test_comments_come_while_the_prompt_is_computed_and_the_stream_still_parses(self, path: str) -> None:
        with fake_server(sse_keepalive_seconds=0.01) as server:
            undisturbed = read_stream(server.client, path, body(path, 8))
            stream = EventStream()
            with (
                server.gate.closed(),
                server.client.stream("POST", path, json=body(path, 8, stream=True)) as response,
            ):
                for line in response.iter_lines():
                    stream.read(line)
                    if stream.comments == 3:
                        server.gate.open()
            assert stream.comments >= 3
            assert stream.text == undisturbed.text
            assert len(stream.data) == len(undisturbed.data)
            assert stream.done == undisturbed.done

    def test_openais_client_reads_a_stream_with_comments(self) -> None:
        with fake_server(sse_keepalive_seconds=0.01) as server, server.openai() as openai:
            with server.gate.closed():
                opener = threading.Timer(0.2, server.gate.open)
                opener.start()
                chunks = list(openai.completions.create(model="fake-model", prompt="a", max_tokens=5, stream=True))
                opener.join()
            assert chunks[-1].choices[0].finish_reason == "length"

    def test_no_comment_comes_between_tokens_that_do_come(self, client: httpx.Client) -> None:
        assert read_stream(client, "/generate", body("/generate")).comments == 0


class TestDisconnect:
    """A client that goes away ends its request: it leaves the engine before the next step and its pages return."""

    @pytest.mark.parametrize("path", PATHS)
    def test_from_a_whole_answer(self, server: FakeServer, path: str) -> None:
        before = ended(server, "cancelled")
        with server.gate.closed():
            with server.new_client() as client, pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body(path), timeout=httpx.Timeout(60, read=0.2))
            server.gate.wait_until_reached()
            wait_until(lambda: server.inbox_size > 0, "the cancellation reaches the engine")
        server.wait_until_idle()
        assert ended(server, "cancelled") == before + 1

    @pytest.mark.parametrize("path", PATHS)
    def test_from_a_stream(self, server: FakeServer, path: str) -> None:
        before = ended(server, "cancelled")
        with server.new_client() as client, server.gate.closed():
            with client.stream("POST", path, json=body(path, stream=True)) as response:
                assert response.status_code == 200
                server.gate.wait_until_reached()
            wait_until(lambda: server.inbox_size > 0, "the cancellation reaches the engine")
        server.wait_until_idle()
        assert ended(server, "cancelled") == before + 1

    def test_from_the_queue(self) -> None:
        with fake_server(max_running=1) as server, server.new_client() as client, server.gate.closed():
            with client.stream("POST", "/generate", json=body("/generate", stream=True)):
                server.gate.wait_until_reached()
                with client.stream("POST", "/generate", json=body("/generate", stream=True)):
                    assert server.num_queued == 1
                wait_until(lambda: server.inbox_size > 1, "the cancellation follows the request")
            wait_until(lambda: server.inbox_size > 2, "both cancellations reach the engine")
            server.gate.open()
            server.wait_until_idle()
            assert ended(server, "cancelled") == 2

    def test_others_are_not_disturbed(self, server: FakeServer) -> None:
        alone = read_stream(server.client, "/generate", body("/generate"))
        stream = EventStream()
        with (
            server.gate.closed(),
            server.client.stream("POST", "/generate", json=body("/generate", stream=True)) as staying,
        ):
            with server.client.stream("POST", "/generate", json=body("/generate", stream=True)):
                server.gate.wait_until_reached()
            server.gate.open()
            for line in staying.iter_lines():
                stream.read(line)
        assert stream.text == alone.text
        assert stream.data[-1]["finish_reason"] == "length"

    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("stream", [False, True])
    def test_before_the_answer_begins(self, server: FakeServer, path: str, stream: bool) -> None:
        """A client may be gone when its request is admitted: nothing would be there to notice it later."""
        before, total = ended(server, "cancelled"), admitted(server)
        with (
            server.gate.closed(),
            server.client.stream("POST", "/generate", json=body("", 1, stream=True)) as other,
        ):
            server.gate.wait_until_reached()
            content = body(path, stream=stream)
            vanishing = asyncio.run_coroutine_threadsafe(post_and_vanish(server, path, content), server.loop)
            wait_until(lambda: server.inbox_size > 1, "the request and its cancellation reach the engine")
            server.gate.open()
            other.read()
        vanishing.result(60)
        server.wait_until_idle()
        assert admitted(server) == total + 2
        assert ended(server, "cancelled") == before + 1


async def post_and_vanish(server: FakeServer, path: str, content: dict[str, Any]) -> None:
    """Send a request straight into the application, as uvicorn would whose client closed the connection at once."""
    messages: list[Message] = [{"type": "http.request", "body": json.dumps(content).encode(), "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        return

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }
    await server.app(scope, receive, send)


class TestDeadline:
    """A request that takes too long is told so, and leaves the engine as if its client had gone. The gate keeps it from
    ending earlier, however fast the machine is."""

    def over_time(self, server: FakeServer) -> float:
        return server.samples().get("ropewalk_request_refused_total{code=deadline_exceeded}", 0)

    def open_when_cancelled(self, server: FakeServer, *, already_sent: int = 0) -> threading.Thread:
        """Open the gate once a cancellation has reached the engine, beside other messages."""

        def wait() -> None:
            server.gate.wait_until_reached()
            wait_until(lambda: server.inbox_size > already_sent, "the cancellation reaches the engine")
            server.gate.open()

        opening = threading.Thread(target=wait)
        opening.start()
        return opening

    @pytest.mark.parametrize("path", PATHS)
    def test_a_whole_answer_is_a_408_that_names_the_limit(self, server: FakeServer, path: str) -> None:
        before, cancelled = self.over_time(server), ended(server, "cancelled")
        with server.gate.closed():
            opening = self.open_when_cancelled(server)
            response = server.client.post(path, json=body(path, timeout=0.05))
            opening.join(60)
        error = error_of(response)
        assert (response.status_code, error["code"]) == (408, "deadline_exceeded")
        assert error["message"] == "the request took longer than its timeout of 0.05 seconds"
        server.wait_until_idle()
        assert self.over_time(server) == before + 1
        assert ended(server, "cancelled") == cancelled + 1

    @pytest.mark.parametrize("path", PATHS)
    def test_a_stream_ends_in_an_error_event(self, server: FakeServer, path: str) -> None:
        before = self.over_time(server)
        with server.gate.closed():
            opening = self.open_when_cancelled(server)
            stream = read_stream(server.client, path, body(path, timeout=0.05))
            opening.join(60)
        assert stream.data[-1]["error"]["code"] == "deadline_exceeded"
        assert all("error" not in event for event in stream.data[:-1])
        server.wait_until_idle()
        assert self.over_time(server) == before + 1

    def test_time_in_the_queue_counts(self) -> None:
        with fake_server(max_running=1) as server, server.new_client() as client:
            with server.gate.closed(), client.stream("POST", "/generate", json=body("", stream=True)) as first:
                server.gate.wait_until_reached()
                opening = self.open_when_cancelled(server, already_sent=1)
                response = server.client.post("/generate", json=body("", timeout=0.05))
                opening.join(60)
                assert "finish_reason" in first.read().decode()
            assert response.status_code == 408
            server.wait_until_idle()
            assert (ended(server, "cancelled"), ended(server, "length")) == (1, 1)

    def test_without_a_timeout_of_its_own_the_servers_counts(self) -> None:
        with fake_server(request_timeout_seconds=0.05) as server:
            with server.gate.closed():
                opening = self.open_when_cancelled(server)
                assert server.client.post("/generate", json=body("")).status_code == 408
                opening.join(60)
            server.wait_until_idle()

    @pytest.mark.parametrize("path", PATHS)
    def test_more_than_the_server_allows_is_refused_with_both(self, path: str) -> None:
        with fake_server(request_timeout_seconds=1000) as server:
            assert server.client.post(path, json=body(path, 1, timeout=1000)).status_code == 200
            response = server.client.post(path, json=body(path, 1, timeout=1000.5))
            error = error_of(response)
            assert (response.status_code, error["param"]) == (400, "timeout")
            assert error["message"] == "timeout: at most 1000 seconds are allowed, it is 1000.5"

    def test_who_ends_in_time_hears_nothing_of_it(self, server: FakeServer) -> None:
        before = self.over_time(server)
        answer = server.client.post("/generate", json=body("", timeout=1e308)).json()
        assert answer["finish_reason"] == "length"
        server.wait_until_idle()
        assert self.over_time(server) == before


class TestEngineFault:
    @pytest.mark.parametrize("path", PATHS)
    def test_a_whole_answer_is_a_500_in_openais_shape_and_the_server_goes_on(
        self, server: FakeServer, path: str
    ) -> None:
        before = ended(server, "error")
        server.gate.fault = ValueError("a secret of the engine")
        response = server.client.post(path, json=body(path))
        server.gate.fault = None
        error = error_of(response)
        assert (response.status_code, error["type"], error["code"]) == (500, "server_error", "generation_failed")
        assert "secret" not in response.text
        assert ended(server, "error") == before + 1
        assert server.client.post(path, json=body(path)).status_code == 200

    @pytest.mark.parametrize("path", PATHS)
    def test_a_stream_ends_in_an_error_event(self, server: FakeServer, path: str) -> None:
        server.gate.fault = ValueError("a secret of the engine")
        stream = read_stream(server.client, path, body(path))
        server.gate.fault = None
        error = stream.data[-1]["error"]
        assert set(stream.data[-1]) == {"error"}
        assert (error["type"], error["code"]) == ("server_error", "generation_failed")
        assert "secret" not in error["message"]
        assert all("error" not in event for event in stream.data[:-1])

    def test_openais_client_raises_both(self, server: FakeServer) -> None:
        server.gate.fault = ValueError("broken")
        with server.openai() as openai:
            with pytest.raises(InternalServerError) as whole:
                openai.completions.create(model="fake-model", prompt="a")
            assert whole.value.code == "generation_failed"
            with pytest.raises(APIError) as streamed:
                list(openai.completions.create(model="fake-model", prompt="a", stream=True))
            assert streamed.value.code == "generation_failed"
        server.gate.fault = None


class TestEngineStopped:
    """The engine is stopped under live requests: each of them is told, none hangs."""

    def test_a_whole_answer_is_a_503_with_retry_after(self) -> None:
        with fake_server() as server, server.new_client() as client:
            answers: list[httpx.Response] = []
            with server.gate.closed():
                asking = threading.Thread(target=lambda: answers.append(client.post("/generate", json=body(""))))
                asking.start()
                server.gate.wait_until_reached()
                stopping = stop_engine(server)
            asking.join(60)
            stopping.join(60)
            error = error_of(answers[0])
            assert (answers[0].status_code, error["code"]) == (503, "cancelled")
            assert "retry-after" in answers[0].headers
            assert ended(server, "cancelled") == 1

    def test_a_stream_ends_in_an_error_event_and_nothing_is_ready_any_more(self) -> None:
        with fake_server() as server, server.new_client() as client:
            stream = EventStream()
            with server.gate.closed(), client.stream("POST", "/generate", json=body("", stream=True)) as response:
                server.gate.wait_until_reached()
                stopping = stop_engine(server)
                server.gate.open()
                for line in response.iter_lines():
                    stream.read(line)
            stopping.join(60)
            assert stream.data[-1]["error"]["code"] == "cancelled"
            for path in ("/ready", "/health"):
                assert server.client.get(path).status_code == 503
            refused = server.client.post("/generate", json=body(""))
            assert (refused.status_code, error_of(refused)["code"]) == (503, "not_ready")


def stop_engine(server: FakeServer) -> threading.Thread:
    """Stop the engine from a thread of its own, for it waits for the step that stands before the gate."""
    assert server.loaded is not None
    engine = server.loaded.engine
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    wait_until(lambda: engine._stopping, "the engine is told to stop")
    return stopping


def test_the_server_stops_only_when_a_running_stream_has_ended() -> None:
    with fake_server() as server, server.new_client() as client:
        stream = EventStream()
        with server.gate.closed(), client.stream("POST", "/generate", json=body("", stream=True)) as response:
            server.gate.wait_until_reached()
            server._uvicorn.should_exit = True
            wait_until(lambda: not server._uvicorn.servers[0].is_serving(), "the server takes no new connection")
            server.gate.open()
            for line in response.iter_lines():
                stream.read(line)
        assert stream.data[-1]["finish_reason"] == "length"
        assert stream.data[-1]["usage"]["completion_tokens"] == LONG
