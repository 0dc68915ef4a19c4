"""Clients and a model that misbehave, over real sockets. After each fault every page is back, every admitted request
has had one terminal event, no file is left open, and the server is as well as it should be.

What single bad values do is in `tests/service/api/test_errors.py`, how a stream's client goes away in
`tests/service/api/test_respond.py`.
"""

import asyncio
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from service.core import Sequence
from tests.e2e.test_embedded import program, totals
from tests.fakes import expected_output
from tests.serving import DEADLINE, EventStream, FakeServer, error_of, fake_server, read_stream, wait_until

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
JSON = {"Content-Type": "application/json"}


def body(path: str = "/generate", **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "abc"}
    return prompt | {"max_tokens": 5} | fields


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that has come through whatever a test did to it."""
    with fake_server(max_running=4, max_queued=8, prefix_caching=True) as running, no_file_left_open(running):
        yield running
        assert_unharmed(running)


@contextmanager
def no_file_left_open(server: FakeServer) -> Iterator[None]:
    """After the block the process, which holds both ends of every connection, has no more open files than before."""
    process = psutil.Process()
    assert server.client.get("/health").status_code == 200
    before = process.num_fds()
    yield
    server.client.close()  # with however many connections it has come to have
    server.client = server.new_client()
    assert server.client.get("/health").status_code == 200
    wait_until(lambda: process.num_fds() <= before, "every connection is closed")


def assert_unharmed(server: FakeServer) -> None:
    server.wait_until_idle()
    counted = totals(server)
    assert counted["admitted"] == counted["ended"]
    assert counted["used"] == 0
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").status_code == 200
    answer = server.client.post("/generate", json=body()).json()
    assert answer["token_ids"] == expected_output([*b"abc"], 5)
    server.wait_until_idle()


def connect(server: FakeServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE)


def reset(connection: socket.socket) -> None:
    """End a connection as the kernel of a client that was killed does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def raw_request(path: str, content: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(content)}\r\n\r\n".encode() + content


class TestClients:
    def test_killed_in_the_middle_of_their_streams(self, server: FakeServer) -> None:
        with server.gate.closed():
            connections = [connect(server) for _ in range(9)]
            for number, connection in enumerate(connections):
                path = ROUTES[number % len(ROUTES)]
                request = body(path, max_tokens=50, stream=True)
                connection.sendall(raw_request(path, json.dumps(request).encode()))
                assert connection.recv(20).startswith(b"HTTP/1.1 200")
            server.gate.wait_until_reached()
            server.gate.pass_one_step()
            taken = server.inbox_size
            for connection in connections:
                reset(connection)
            wait_until(lambda: server.inbox_size == taken + 9, "all cancellations reach the engine")
        server.wait_until_idle()
        assert totals(server)["cancelled"] == 9

    @pytest.mark.parametrize("end", [reset, socket.socket.close])
    def test_gone_after_half_of_a_body(self, server: FakeServer, end: Callable[[socket.socket], None]) -> None:
        content = json.dumps(body()).encode()
        for path in ROUTES:
            for cut in (0, 1, len(content) // 2, len(content) - 1):
                connection = connect(server)
                connection.sendall(raw_request(path, content[:cut], len(content)))
                end(connection)
        wait_until(lambda: not server._uvicorn.server_state.tasks, "the server has noticed")
        assert totals(server)["admitted"] == 0

    def test_killed_as_a_whole_process(self, server: FakeServer) -> None:
        """The kernel closes what a killed process had open; nothing in it gets to say goodbye."""
        request = raw_request("/generate", json.dumps(body(max_tokens=60, stream=True)).encode())
        host, port = server.url.removeprefix("http://").split(":")
        with server.gate.closed():
            code = (
                "import socket, sys, time\n"
                f"connection = socket.create_connection(({host!r}, {port}))\n"
                f"connection.sendall({request!r})\n"
                "connection.recv(20)\n"
                "print('reading', flush=True)\n"
                "time.sleep(1000)\n"
            )
            with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as client:
                assert client.stdout is not None
                assert client.stdout.readline() == "reading\n"
                server.gate.wait_until_reached()
                server.gate.pass_one_step()
                taken = server.inbox_size
                client.kill()
            wait_until(lambda: server.inbox_size == taken + 1, "its cancellation reaches the engine")
        server.wait_until_idle()
        assert totals(server)["cancelled"] == 1

    def test_that_open_10_000_connections_and_drop_them(self, server: FakeServer) -> None:
        beginnings = [
            b"",
            b"P",
            b"POST /generate HTTP/1.1\r\n",
            raw_request("/generate", b"{", 50),
            b"\x16\x03\x01\x02",
        ]
        beginnings.append(raw_request("/generate", json.dumps(body(stream=True)).encode()))
        dice = random.Random(5)
        for _ in range(100):
            batch = [connect(server) for _ in range(100)]
            for connection in batch:
                connection.sendall(dice.choice(beginnings))
            for connection in batch:
                with suppress(BrokenPipeError, ConnectionResetError):  # the server has answered nonsense, and closed
                    (reset if dice.random() < 0.5 else socket.socket.close)(connection)
        wait_until(lambda: len(server._uvicorn.server_state.connections) <= 1, "only the test's own client is left")

    def test_more_than_the_queue_holds(self, server: FakeServer) -> None:
        """4 run and 8 wait; whoever else comes is told so, and nobody is forgotten."""
        statuses: list[int] = []

        async def ask_all() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE, trust_env=False) as client:
                asking = [asyncio.create_task(ask(client)) for _ in range(40)]
                await asyncio.to_thread(wait_until, lambda: len(statuses) >= 27, "those without a place are refused")
                server.gate.open()
                await asyncio.gather(*asking)

        async def ask(client: httpx.AsyncClient) -> None:
            response = await client.post("/generate", json=body())
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
            statuses.append(response.status_code)

        with server.gate.closed(), server.client.stream("POST", "/generate", json=body(stream=True)) as first:
            server.gate.wait_until_reached()
            asyncio.run(ask_all())
            first.read()
        assert set(statuses) == {200, 429}
        refused = server.samples()["ropewalk_request_refused_total{code=queue_full}"]
        assert statuses.count(429) == refused
        assert totals(server)["length"] == 1 + statuses.count(200)


class TestContent:
    @pytest.mark.parametrize("path", [*ROUTES, "/tokenize"])
    def test_a_megabyte_of_one_character(self, server: FakeServer, path: str) -> None:
        text = "a" * 2**20
        prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        response = server.client.post(path, json=prompt)
        assert response.status_code == (200 if path == "/tokenize" else 400)
        if path != "/tokenize":
            error = error_of(response)
            assert error["code"] == "context_length_exceeded"
            assert len(error["message"]) < 200

    def test_all_kinds_of_garbage_while_others_are_served(self, server: FakeServer) -> None:
        garbage = [
            *(b"\xff\xfe\x00", b'{"prompt": "\xc3\x28"}', b'{"prompt": "\xed\xa0\x80"}', b"\x00" * 1000),
            *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}"),
            *(b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": 1e999}'),
            *(b'{"prompt": "a", "max_tokens": 1e30}', b'{"prompt": "a", "logit_bias": {"5": -Infinity}}'),
            *(
                b'{"prompt": "a", "n": 9223372036854775807}',
                b'{"prompt": "a", "logit_bias": {"' + b"9" * 5000 + b'": 1}}',
            ),
            *(b"[" * 200_000, b'{"rope":' * 50_000 + b"1" + b"}" * 50_000, b'{"prompt": ' + b"[" * 10_000),
        ]
        expected = expected_output([*b"abc"], 60)
        with ThreadPoolExecutor(4) as pool:
            served = [pool.submit(read_stream, server.client, "/generate", body(max_tokens=60)) for _ in range(4)]
            for content in garbage:
                for path in ROUTES:
                    response = server.client.post(path, content=content, headers=JSON)
                    assert response.status_code == 400, content[:50]
                    error_of(response)
            for stream in served:
                assert [token for event in stream.result().data for token in event["token_ids"]] == expected


class TestHttp:
    """What HTTP/1.1 allows and clients seldom do."""

    CONTENT = json.dumps(body(max_tokens=3)).encode()
    EXPECTED = expected_output([*b"abc"], 3)

    def exchange(self, server: FakeServer, *parts: bytes) -> bytes:
        """Send the parts one by one and read until the server closes the connection."""
        with connect(server) as connection:
            for part in parts:
                connection.sendall(part)
            received = b""
            while more := connection.recv(65536):
                received += more
        return received

    def head(self, *lines: str, version: str = "1.1") -> bytes:
        start = f"POST /generate HTTP/{version}"
        return "\r\n".join([start, "Host: a", "Content-Type: application/json", *lines, "", ""]).encode()

    def answers(self, received: bytes) -> list[dict[str, Any]]:
        """The JSON bodies of the answers, in order."""
        parts = received.split(b"HTTP/1.1 200 OK\r\n")[1:]
        return [json.loads(part.partition(b"\r\n\r\n")[2]) for part in parts]

    def test_pipelined_requests_are_answered_in_order(self, server: FakeServer) -> None:
        prompts = ["abc", "b", "cc"]
        contents = [json.dumps(body(prompt=prompt, max_tokens=3)).encode() for prompt in prompts]
        requests = [
            self.head(f"Content-Length: {len(content)}", *(["Connection: close"] if content == contents[-1] else []))
            + content
            for content in contents
        ]
        answers = self.answers(self.exchange(server, b"".join(requests)))
        expected = [expected_output([*prompt.encode()], 3) for prompt in prompts]
        assert [answer["token_ids"] for answer in answers] == expected

    def test_http_1_0_is_answered_and_the_connection_closed(self, server: FakeServer) -> None:
        received = self.exchange(
            server, self.head(f"Content-Length: {len(self.CONTENT)}", version="1.0") + self.CONTENT
        )
        [answer] = self.answers(received)
        assert answer["token_ids"] == self.EXPECTED

    def test_a_body_in_chunks_is_put_together(self, server: FakeServer) -> None:
        chunks = [b"%x\r\n%s\r\n" % (1, bytes([byte])) for byte in self.CONTENT]
        head = self.head("Transfer-Encoding: chunked", "Connection: close")
        [answer] = self.answers(self.exchange(server, head, *chunks, b"0\r\n\r\n"))
        assert answer["token_ids"] == self.EXPECTED

    @pytest.mark.parametrize("chunk", [b"zz\r\nabc\r\n", b"ffffffffffffffffffff\r\n", b"5\r\nabcdefgh\r\n"])
    def test_chunks_that_are_none_end_the_connection(self, server: FakeServer, chunk: bytes) -> None:
        received = self.exchange(server, self.head("Transfer-Encoding: chunked"), chunk)
        assert received.startswith(b"HTTP/1.1 400")
        assert totals(server)["admitted"] == 0

    def test_who_asks_whether_to_send_a_body_is_told_to(self, server: FakeServer) -> None:
        head = self.head(f"Content-Length: {len(self.CONTENT)}", "Expect: 100-continue", "Connection: close")
        with connect(server) as connection:
            connection.sendall(head)
            assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue")
            connection.sendall(self.CONTENT)
            received = b""
            while more := connection.recv(65536):
                received += more
        [answer] = self.answers(received)
        assert answer["token_ids"] == self.EXPECTED

    @pytest.mark.parametrize("request_line", [b"GET\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n", b"G" * 100_000])
    def test_what_is_not_http_is_a_400(self, server: FakeServer, request_line: bytes) -> None:
        assert self.exchange(server, request_line).startswith(b"HTTP/1.1 400")


class TestExtremes:
    @pytest.mark.parametrize("n", [1, 2, 6, 12])
    def test_as_many_choices_as_there_is_room_for(self, server: FakeServer, n: int) -> None:
        prompts = ["abc"] * (12 // n)
        answer = server.client.post("/v1/completions", json=body(prompt=prompts, n=n)).json()
        expected = bytes(expected_output([*b"abc"], 5)).decode()
        assert [choice["text"] for choice in answer["choices"]] == [expected] * 12

    @pytest.mark.parametrize(("n", "prompts"), [(13, 1), (1, 13), (7, 2), (2**62, 1), (1, 100_000), (2**62, 1000)])
    def test_more_choices_than_that_are_refused_whole(self, server: FakeServer, n: int, prompts: int) -> None:
        error = error_of(server.client.post("/v1/completions", json=body(prompt=["abc"] * prompts, n=n)))
        assert error["code"] == "max_choices_exceeded"
        assert totals(server)["admitted"] == 0

    @pytest.mark.parametrize("count", [1, 1024, 1025, 20_000])
    def test_tools(self, server: FakeServer, count: int) -> None:
        """The model's template knows none; and beyond a number nobody's would be asked."""
        deep: dict[str, Any] = {}
        for _ in range(50):
            deep = {"type": "object", "properties": {"a": deep}}
        tools = [
            {"type": "function", "function": {"name": f"f{number}", "parameters": deep}} for number in range(count)
        ]
        response = server.client.post("/v1/chat/completions", json=body("chat", tools=tools))
        if count == 20_000:
            assert response.status_code == 413
        else:
            assert response.status_code == 400
            assert error_of(response)["param"] == "tools"
        assert totals(server)["admitted"] == 0


class TestFullCache:
    def test_requests_give_pages_back_and_all_are_served(self) -> None:
        """Each needs nearly all pages in the end; four run at first."""
        with fake_server(max_running=4, max_queued=16, num_pages=20, prefix_caching=True) as server:
            prompts = ["x" * 8 + chr(97 + number) for number in range(12)]
            with ThreadPoolExecutor(12) as pool:
                requests = [body(prompt=prompt, max_tokens=50) for prompt in prompts]
                asked = [pool.submit(read_stream, server.client, "/generate", request) for request in requests]
                for prompt, stream in zip(prompts, asked, strict=True):
                    tokens = [token for event in stream.result().data for token in event["token_ids"]]
                    assert tokens == expected_output([*prompt.encode()], 50)
            assert server.samples()["ropewalk_num_preemptions_total"] > 0
            assert totals(server)["length"] == 12
            assert_unharmed(server)


class TestModel:
    FAULTS = (ValueError("broken"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError())

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
    @pytest.mark.parametrize("failing_step", [0, 3])
    def test_a_step_that_fails_takes_its_own_requests_along_and_no_others(
        self, server: FakeServer, fault: Exception, failing_step: int
    ) -> None:
        """Four run and four wait; those that wait share prefixes with those that fail."""
        in_the_step: set[str] = set()

        def fail_once(number: int, step: Mapping[Sequence, int]) -> None:
            server.gate(number, step)
            if number == failing_step:
                in_the_step.update(sequence.request_id for sequence in step)
                raise fault

        server.parts.runner.before_step = fail_once
        prompts = {f"id-{number}": "x" * 10 + str(number % 4) for number in range(8)}
        with ThreadPoolExecutor(8) as pool:
            with server.gate.closed():
                first = pool.submit(self.ask, server, "id-0", prompts["id-0"])
                server.gate.wait_until_reached()
                others = [pool.submit(self.ask, server, name, prompts[name]) for name in list(prompts)[1:]]
                wait_until(lambda: totals(server)["admitted"] + server.inbox_size == 8, "all have arrived")
            answers = dict(zip(prompts, [first.result(), *(other.result() for other in others)], strict=True))
        failed = {name for name, answer in answers.items() if answer.status_code == 500}
        assert in_the_step == {f"gen-{name}" for name in failed}
        assert 0 < len(failed) < 8
        for name, answer in answers.items():
            if name in failed:
                assert error_of(answer)["code"] == "generation_failed"
                assert type(fault).__name__ in error_of(answer)["message"]
            else:
                assert answer.json()["token_ids"] == expected_output([*prompts[name].encode()], 5)
        assert server.samples()["ropewalk_step_failures_total"] == 1

    def ask(self, server: FakeServer, name: str, prompt: str) -> httpx.Response:
        return server.client.post("/generate", json=body(prompt=prompt), headers={"X-Request-Id": name})

    def test_streams_of_a_failed_step_end_in_one_error_event(self, server: FakeServer) -> None:
        server.gate.fault = torch.OutOfMemoryError("CUDA out of memory")
        for path in ROUTES:
            stream = read_stream(server.client, path, body(path))
            assert [event["error"]["code"] for event in stream.data if "error" in event] == ["generation_failed"]
            assert "error" in stream.data[-1]
        server.wait_until_idle()
        assert server.client.get("/health").status_code == 503  # three in a row
        server.gate.fault = None
        assert server.client.post("/generate", json=body()).status_code == 200


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_jump_of_the_clock_changes_nothing(server: FakeServer, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """Deadlines, timings and Retry-After go by a clock that only ever rises."""
    with (
        server.gate.closed(),
        server.client.stream("POST", "/generate", json=body(stream=True, timeout=1000)) as running,
    ):
        server.gate.wait_until_reached()
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + jump)
        server.gate.open()
        stream = EventStream()
        for line in running.iter_lines():
            stream.read(line)
    last = stream.data[-1]
    assert last["finish_reason"] == "length"
    assert all(0 <= seconds < DEADLINE for seconds in last["timing"].values())
    answer = server.client.post("/generate", json=body(timeout=1000)).json()
    assert all(0 <= seconds < DEADLINE for seconds in answer["timing"].values())


class TestSignals:
    """The real program, over the embedded model."""

    SETTINGS = ("--max-model-len", "8192", "--kv-cache-memory", "256MiB", "--shutdown-seconds", "1000")

    def test_keys_are_read_again_on_sighup_and_a_second_sigterm_ends_at_once(
        self, embedded_model_folder: Path, tmp_path: Path
    ) -> None:
        keys = tmp_path / "keys"
        keys.write_text("old\n")
        options = (*self.SETTINGS, "--api-key-file", str(keys), "--log-format", "json")
        with program(tmp_path, str(embedded_model_folder), *options) as running, running.client_once_ready() as client:
            assert client.get("/v1/models", headers={"Authorization": "Bearer old"}).status_code == 200
            keys.write_text("new\n")
            running.process.send_signal(signal.SIGHUP)
            client.headers["Authorization"] = "Bearer new"
            wait_until(lambda: client.get("/v1/models").status_code == 200, "the new key is known")
            assert client.get("/v1/models", headers={"Authorization": "Bearer old"}).status_code == 401

            request = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/generate", json=request) as stream:
                lines = stream.iter_lines()  # kept: without it the stream would be closed
                next(lines)
                running.process.send_signal(signal.SIGTERM)
                wait_until(lambda: client.get("/ready").status_code == 503, "it is not ready any more")
                assert error_of(client.get("/ready"))["code"] == "shutting_down"
                assert not running.has_ended
                running.process.send_signal(signal.SIGTERM)
                assert running.process.wait(DEADLINE) == -signal.SIGTERM
        for line in running.said.splitlines():
            assert json.loads(line).keys() >= {"time", "level", "logger", "message"}


class TestUnderLoad:
    """The real program, its cache small, with more requests than it can run at a time."""

    SETTINGS = (
        *("--max-model-len", "1024", "--kv-cache-memory", "64MiB", "--max-running", "4", "--max-queued", "8"),
        *("--shutdown-seconds", "1000", "--client-timeout-seconds", "3"),
    )

    def test_sigterm_leaves_nobody_without_an_answer(self, embedded_model_folder: Path, tmp_path: Path) -> None:
        with program(tmp_path, str(embedded_model_folder), *self.SETTINGS) as running:
            with running.client_once_ready() as client:
                self.check_half_sent_requests(client)
                ends = asyncio.run(self.load(client.base_url, running.process))
                assert running.process.wait(DEADLINE) == 0, running.said
            assert "Traceback" not in running.said
        assert set(ends) <= {"length", "queue_full", "shutting_down", "refused connection"}
        assert ends.count("length") >= 4  # at least what ran
        assert len(ends) == 30

    def check_half_sent_requests(self, client: httpx.Client) -> None:
        """Both are given up after a while; nobody else has to wait for that."""
        address = (client.base_url.host, client.base_url.port or 80)
        with socket.create_connection(address, DEADLINE) as head, socket.create_connection(address, DEADLINE) as rest:
            head.sendall(b"POST /generate HTTP/1.1\r\nHost:")
            rest.sendall(raw_request("/generate", b'{"prompt"', 100))
            assert client.get("/health").status_code == 200
            assert rest.recv(1000).startswith(b"HTTP/1.1 408")
            assert head.recv(1000) == b""

    async def load(self, url: httpx.URL, process: subprocess.Popen[bytes]) -> list[str]:
        """How each of thirty requests ended, half of them streams; SIGTERM comes once some have a token."""
        first_token = asyncio.Event()

        async def ask(client: httpx.AsyncClient, number: int) -> str:
            await asyncio.sleep(0.05 * max(0, number - 20))  # some come late
            request = {"prompt": f"Number {number}", "max_tokens": 40, "ignore_eos": True, "stream": number % 2 == 0}
            try:
                async with client.stream("POST", "/generate", json=request) as response:
                    last = b""
                    async for line in response.aiter_lines():
                        if line.startswith("data:"):
                            first_token.set()
                        last = line.removeprefix("data: ").encode() or last
            except httpx.ConnectError:
                return "refused connection"
            answer = json.loads(last)
            return str(answer["error"]["code"] if "error" in answer else answer["finish_reason"])

        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE, trust_env=False) as client:
            asking = [asyncio.create_task(ask(client, number)) for number in range(30)]
            await first_token.wait()
            process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*asking)
