"""The sockets that a server listens on. Knows addresses and ports; does not know what is spoken there."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from service.errors import StartupError

BACKLOG = 2048  # connections that wait to be accepted; as uvicorn has it
EVERY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


@contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Listen on every address that a host name has, until the block ends.

    Args:
        host: a name or an address, IPv4 or IPv6.
        port: 0 for any free one.

    Raises:
        StartupError: the port is in use, or cannot be listened on for another reason.
    """
    with ExitStack() as opened:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
            listeners = [opened.enter_context(_listener(family, address)) for family, address in addresses]
        except OSError as error:
            raise StartupError(_in_words(host, port, error)) from error
        yield listeners


def url_of(host: str, listener: socket.socket) -> str:
    """Where a client on this machine reaches a listener: `http://127.0.0.1:8000`."""
    reached = EVERY_ADDRESS.get(host, host)
    return f"http://{f'[{reached}]' if ':' in reached else reached}:{listener.getsockname()[1]}"


def _listener(family: socket.AddressFamily, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a restart has to wait for a minute
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a listener of its own
        listener.bind(address)
        listener.listen(BACKLOG)  # at once: until then another process could bind the port too
    except OSError:
        listener.close()
        raise
    return listener


def _in_words(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"host {host!r} is neither an address nor a name that is known here: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: stop what listens there, or choose another one, --port 0 for any"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host!r} is not an address of this machine: choose one that is, or 0.0.0.0 for all"
    return f"port {port} on {host} cannot be listened on: {error.strerror}"
