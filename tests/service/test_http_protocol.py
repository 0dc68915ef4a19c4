"""Half-sent heads of requests: who does not finish one is cut off, who does is not watched any longer."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import uvicorn

from service.http_protocol import ImpatientProtocol
from tests.serving import DEADLINE, wait_until

HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"
SHORT = 0.05  # seconds
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class Scene:
    """An application that answers `yes`, behind protocols that a test can look at.

    Attributes:
        head_timeout: of connections from here on.
        protocols: one for each connection.
        gate: answers wait until it is open.
        reached: how many requests have come to the application.
    """

    head_timeout: float = DEADLINE
    protocols: list[ImpatientProtocol] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    reached: int = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        assert scope["type"] == "http"
        self.reached += 1
        await asyncio.to_thread(self.gate.wait, DEADLINE)
        message: dict[str, Any] = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"yes"})

    def protocol(self, *arguments: Any, **options: Any) -> ImpatientProtocol:
        made = ImpatientProtocol(*arguments, head_timeout=self.head_timeout, **options)
        self.protocols.append(made)
        return made

    @property
    def is_watching(self) -> bool:
        """Whether the latest connection is about to be given up."""
        return self.protocols[-1]._waiting is not None

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        with socket.create_connection(self.address, DEADLINE) as connection:
            yield connection

    @contextmanager
    def serving(self) -> Iterator[None]:
        http = cast(Any, self.protocol)
        config = uvicorn.Config(cast(Any, self), host="127.0.0.1", port=0, http=http, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait_until(lambda: server.started, "the server listens")
        self.address = server.servers[0].sockets[0].getsockname()
        try:
            yield
        finally:
            self.gate.set()
            server.should_exit = True
            thread.join(DEADLINE)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    with made.serving():
        yield made


def answer(connection: socket.socket) -> bytes:
    """What comes until an answer is complete or the connection is closed."""
    received = b""
    while not received.endswith(b"yes") and (more := connection.recv(1000)):
        received += more
    return received


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, HEAD + b"X-Long: aaa"], ids=["nothing", "verb", "lines", "header"])
def test_a_head_that_does_not_end_closes_the_connection(scene: Scene, sent: bytes) -> None:
    scene.head_timeout = SHORT
    with scene.connection() as connection:
        connection.sendall(sent)
        assert answer(connection) == b""
    assert scene.reached == 0


def test_so_does_a_later_one_on_the_same_connection(scene: Scene) -> None:
    scene.gate.set()
    with scene.connection() as connection:
        connection.sendall(HEAD + b"\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 200")
        scene.protocols[-1]._head_timeout = SHORT
        connection.sendall(HEAD)
        assert answer(connection) == b""
    assert scene.reached == 1


def test_more_lines_give_no_more_time(scene: Scene) -> None:
    with scene.connection() as connection:
        connection.sendall(HEAD)
        wait_until(lambda: bool(scene.protocols), "the connection is made")
        [timer] = {scene.protocols[-1]._waiting}
        for line in (b"X-A: b\r\n", b"X-C: d\r\n"):
            connection.sendall(line)
        connection.sendall(b"\r\n")
        wait_until(lambda: scene.reached == 1, "the request arrives")
        assert timer is not None
        assert timer.cancelled()
        assert not scene.is_watching


def test_while_an_answer_is_waited_for_nobody_watches_the_clock(scene: Scene) -> None:
    with scene.connection() as connection:
        for served in (1, 2):
            scene.gate.clear()
            connection.sendall(HEAD + b"\r\n")
            wait_until(lambda served=served: scene.reached == served, "the request arrives")  # type: ignore[misc]
            assert not scene.is_watching
            scene.gate.set()
            assert answer(connection).endswith(b"yes")


def test_a_body_is_not_its_business(scene: Scene) -> None:
    scene.gate.set()
    with scene.connection() as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\na")
        wait_until(lambda: scene.reached == 1, "the request arrives")
        assert not scene.is_watching
        connection.sendall(b"b")
        assert answer(connection).endswith(b"yes")


def test_who_goes_away_is_not_watched_any_longer(scene: Scene) -> None:
    with scene.connection() as connection:
        connection.sendall(b"GET")
        wait_until(lambda: bool(scene.protocols), "the connection is made")
        assert scene.is_watching
    wait_until(lambda: not scene.is_watching, "the server sees it go")
