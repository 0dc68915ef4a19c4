"""Which addresses are listened on, and that what prevents it is said in one sentence."""

import errno
import os
import socket
from typing import Any

import pytest

from service.errors import StartupError
from service.listening import listening, url_of


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def refusal(host: str, port: int) -> str:
    with pytest.raises(StartupError) as refused, listening(host, port):
        pass
    return str(refused.value)


def test_a_client_can_connect_at_once_and_not_after_the_end() -> None:
    with listening("127.0.0.1", 0) as (listener,):
        address = listener.getsockname()
        socket.create_connection(address).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_every_address_of_a_name_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", 0)) for last in (2, 3, 2)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with listening("somewhere", 0) as listeners:
        assert [listener.getsockname()[0] for listener in listeners] == ["127.0.0.2", "127.0.0.3"]


def test_a_port_in_use_is_told_with_what_to_do() -> None:
    with listening("127.0.0.1", 0) as (listener,):
        port = port_of(listener)
        assert refusal("127.0.0.1", port).startswith(f"port {port} on 127.0.0.1 is in use: ")
        assert "--port 0" in refusal("127.0.0.1", port)


def test_a_port_is_free_again_after_a_connection_that_the_server_closed() -> None:
    with listening("127.0.0.1", 0) as (listener,):
        port = port_of(listener)
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()  # whoever closes first holds the port for a minute
    with listening("127.0.0.1", port) as (again,):
        assert port_of(again) == port


def test_another_machines_address_is_told() -> None:
    said = refusal("192.0.2.1", 0)  # of documentation (RFC 5737)
    assert said.startswith("host '192.0.2.1' is not an address of this machine: ")
    assert "0.0.0.0" in said


def test_an_unknown_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert refusal("nowhere", 0).startswith("host 'nowhere' is neither an address nor a name that is known here: ")


def test_what_the_system_forbids_is_told_and_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", fail)
    assert refusal("127.0.0.1", 80) == "port 80 on 127.0.0.1 cannot be listened on: Permission denied"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1"),
        ("0.0.0.0", "http://127.0.0.1"),
        ("::", "http://[::1]"),
        ("fe80::1", "http://[fe80::1]"),
        ("localhost", "http://localhost"),
    ],
)
def test_the_url_is_one_that_works_here(host: str, url: str) -> None:
    with listening("127.0.0.1", 0) as (listener,):
        assert url_of(host, listener) == f"{url}:{port_of(listener)}"
