"""How a server ends, and how it treats clients that take nothing; signals themselves are in `tests/e2e`."""

import json
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from service import build, logs
from service.commands.serve import DrainingServer, cut_off_slow_clients, log_changed, serve
from service.core import Sequence
from service.errors import StartupError
from service.listening import listening
from service.settings import Settings
from tests.serving import EventStream, FakeServer, error_of, fake_server, wait_until

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1000,
    "rope_theta": 10000.0,
}
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


def test_its_last_line_once_it_is_ready_says_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with draining_server(monkeypatch) as server:
        wait_until(lambda: "ready: " in caplog.text, "it says that it is ready")
        lines = [record.getMessage() for record in caplog.records]
        (running,) = [number for number, line in enumerate(lines) if line.startswith(f"running on {server.url};")]
        (ready,) = [number for number, line in enumerate(lines) if line.startswith(f"ready: {server.url} ")]
        assert running < ready
        assert caplog.records[ready].__dict__["fields"] == {"url": server.url}
        assert server.client.get("/docs").status_code == 200
        assert not [record for record in caplog.records[ready + 1 :] if record.name.startswith("service.")]


def test_what_was_changed_is_logged_as_text_and_as_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_changed(Settings.model_validate({"growth": "stop", "port": 5, "api_key": "open-sesame"}))
    log_changed(Settings.model_validate({}))
    changed, unchanged = caplog.records
    assert changed.getMessage() == 'settings other than their defaults: port 5, api_key "**********", growth "stop"'
    assert changed.__dict__["fields"] == {"settings": {"port": 5, "api_key": "**********", "growth": "stop"}}
    assert unchanged.getMessage() == "all settings have their defaults"
    assert unchanged.__dict__["fields"] == {"settings": {}}


def test_a_port_in_use_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    loads: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(build, "load", lambda *given: loads.append(given))
    with listening("127.0.0.1", 0) as (listener,):
        port = listener.getsockname()[1]
        with pytest.raises(StartupError, match=f"^port {port} on 127.0.0.1 is in use: "):
            serve({"model": str(tmp_path), "port": str(port)})
    assert loads == []


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
