"""A body that does not come: half of it, then nothing, or then the end of the connection."""

import socket
from collections.abc import Iterator

import pytest

from tests.serving import FakeServer, fake_server, wait_until

HALF = (
    b'POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{"prompt": "a'
)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(client_timeout_seconds=0.05) as running:
        yield running


def connection(server: FakeServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def refusals(server: FakeServer, code: str) -> float:
    return server.samples().get(f"ropewalk_request_refused_total{{code={code}}}", 0)


def test_a_client_that_sends_half_of_its_body_and_no_more_is_given_up(server: FakeServer) -> None:
    before = refusals(server, "body_timeout")
    with connection(server) as client:
        client.sendall(HALF)
        answer = b"".join(iter(lambda: client.recv(4096), b""))  # the server closes the connection
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in answer
    assert b"nothing came of the body's rest for 0.05 seconds" in answer
    assert refusals(server, "body_timeout") == before + 1


def test_a_request_may_take_longer_than_its_body(server: FakeServer) -> None:
    body = {"prompt": "a", "max_tokens": 3}
    with server.gate.closed(), server.client.stream("POST", "/generate", json=body | {"stream": True}) as response:
        server.gate.wait_until_reached()
        refused = refusals(server, "body_timeout")
        with connection(server) as silent:
            silent.sendall(HALF)
            wait_until(lambda: refusals(server, "body_timeout") > refused, "another's silence is noticed")
        server.gate.open()
        assert '"finish_reason":"length"' in response.read().decode()
    server.wait_until_idle()
