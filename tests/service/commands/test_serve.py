"""How a server ends, and how it treats clients that take nothing; signals themselves are in `tests/e2e`."""

import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from service.commands.serve import DrainingServer, cut_off_slow_clients
from service.core import Sequence
from service.settings import Settings
from tests.serving import EventStream, FakeServer, error_of, fake_server, wait_until

LONG = {"prompt": "a", "max_tokens": 60, "stream": True}


@contextmanager
def draining_server(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[FakeServer]:
    """A fake server that `ropewalk serve`'s own kind of uvicorn server runs."""
    server = fake_server(**settings)
    with monkeypatch.context() as patch:
        patch.setattr(uvicorn, "Server", lambda config: DrainingServer(config, server.settings))
        server.__enter__()
    try:
        yield server
    finally:
        server.gate.open()
        server.__exit__(None, None, None)


def test_what_runs_is_finished_while_the_port_stays_open_and_says_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    with draining_server(monkeypatch) as server:
        stream = EventStream()
        with (
            server.new_client() as client,
            server.gate.closed(),
            client.stream("POST", "/generate", json=LONG) as response,
        ):
            server.gate.wait_until_reached()
            server._uvicorn.should_exit = True
            wait_until(lambda: server.client.get("/ready").status_code == 503, "it is not ready any more")
            with server.new_client() as newcomer:
                for answer in (newcomer.get("/ready"), newcomer.post("/generate", json=LONG)):
                    assert (answer.status_code, error_of(answer)["code"]) == (503, "shutting_down")
                assert newcomer.get("/health").status_code == 200
            server.gate.open()
            for line in response.iter_lines():
                stream.read(line)
        assert stream.data[-1]["finish_reason"] == "length"
        assert stream.data[-1]["usage"]["completion_tokens"] == LONG["max_tokens"]
        wait_until(lambda: not server.is_serving, "the server ends")


def test_what_does_not_finish_in_time_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with draining_server(monkeypatch, shutdown_seconds=0) as server:
        stream = EventStream()
        with (
            server.new_client() as client,
            server.gate.closed(),
            client.stream("POST", "/generate", json=LONG) as response,
        ):
            server.gate.wait_until_reached()
            server._uvicorn.should_exit = True
            assert server.loaded is not None
            engine = server.loaded.engine
            wait_until(lambda: engine._stopping, "the engine is told to stop")
            server.gate.open()
            for line in response.iter_lines():
                stream.read(line)
        assert stream.data[-1]["error"]["code"] == "cancelled"
        wait_until(lambda: not server.is_serving, "the server ends")


def test_an_idle_server_ends_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with draining_server(monkeypatch, shutdown_seconds=1_000_000) as server:
        server._uvicorn.should_exit = True
        wait_until(lambda: not server.is_serving, "the server ends")


def test_the_first_signal_drains_and_the_second_has_its_usual_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *given: done.append(given))
    monkeypatch.setattr(signal, "raise_signal", done.append)
    server = DrainingServer(uvicorn.Config("nowhere:app"), Settings.model_validate({}))
    server.handle_exit(signal.SIGTERM, None)
    assert (server.should_exit, done) == (True, [])
    server.handle_exit(signal.SIGTERM, None)
    assert done == [(signal.SIGTERM, signal.SIG_DFL), signal.SIGTERM]


def test_a_client_that_takes_nothing_is_cut_off_and_its_request_ends() -> None:
    with fake_server() as server:
        cut_off_slow_clients(server._uvicorn.servers[0], seconds=0.2)

        def hold(number: int, _: Mapping[Sequence, int]) -> None:
            if number == 200:  # of 255: by now more is sent than the client has room for
                wait_until(lambda: server.inbox_size > 0, "the cancellation reaches the engine")

        server.parts.runner.before_step = hold
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's least
            slow.connect((host, int(port)))
            body = b'{"prompt": "a", "stream": true}'
            head = (
                f"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            )
            slow.sendall(head.encode() + b"\r\n\r\n" + body)
            wait_until(lambda: cancelled(server) == 1, "it is cut off")
            assert server.client.post("/generate", json={"prompt": "a", "max_tokens": 3}).status_code == 200
        server.wait_until_idle()
        assert cancelled(server) == 1


def cancelled(server: FakeServer) -> float:
    return server.samples()["ropewalk_request_success_total{finished_reason=cancelled}"]
