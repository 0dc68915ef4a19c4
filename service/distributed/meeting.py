"""How rank 0 and the other ranks of a model come to know each other.

Either rank 0 starts them itself, on its own machine, with a pipe to each; or torchrun has started all of them, and they
find rank 0 by the address that it leaves in torchrun's store. Knows processes and sockets; does not know what is said.
"""

import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError, get_context
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, cast

from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.rendezvous import rendezvous

from service.distributed.place import Place

SECONDS_TO_END = 5.0
_ADDRESS = "ropewalk/leader"  # of rank 0, in the store
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, probes


class Meeting(Protocol):
    """Rank 0's way to the others."""

    place: Place

    def connections(self) -> dict[int, Connection]:
        """A connection to each other rank; returns when all are there."""
        ...

    def store(self) -> Store:
        """The store that all ranks share."""
        ...

    def fate(self, rank: int) -> str:
        """What has become of a rank whose connection has ended, in words that follow its name."""
        ...

    def close(self) -> None:
        """End what is left of the others."""
        ...


class StartedRanks:
    """Processes of this machine that rank 0 starts. They end with it: each sees its pipe close."""

    def __init__(self, size: int, run: Callable[[Place, Connection, str], None]) -> None:
        """Start them.

        Args:
            size: ranks in all, this process included.
            run: what each of them runs: with its place, its end of a pipe and the path of the store.
        """
        self.place = Place(0, 0, size, size)
        self._folder = Path(tempfile.mkdtemp(prefix="ropewalk-"))  # for this user's eyes only
        context = get_context("spawn")
        self._processes: dict[int, BaseProcess] = {}
        self._connections: dict[int, Connection] = {}
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            arguments = (Place(rank, rank, size, size), theirs, str(self._store_path))
            process = context.Process(target=run, args=arguments, name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes[rank], self._connections[rank] = process, ours

    @property
    def _store_path(self) -> Path:
        return self._folder / "store"

    def connections(self) -> dict[int, Connection]:
        return self._connections

    def store(self) -> Store:
        return FileStore(str(self._store_path), self.place.size)

    def fate(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(SECONDS_TO_END)
        code = process.exitcode
        if code is None:
            return "no longer answers"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def close(self) -> None:
        for process in self._processes.values():
            process.join(SECONDS_TO_END)
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


class MetRanks:
    """Processes that torchrun has started, perhaps on other machines; it also ends what is left of them."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store: Store
        self._store, *_ = next(rendezvous("env://"))

    def connections(self) -> dict[int, Connection]:
        key = secrets.token_bytes(32)
        found: dict[int, Connection] = {}
        with Listener((_leaders_host(), 0), authkey=key, backlog=self.place.size) as listener:
            _host, port = cast(tuple[str, int], listener.address)
            self._store.set(_ADDRESS, f"{port} {key.hex()}")
            while len(found) < self.place.size - 1:
                with suppress(AuthenticationError, EOFError, OSError):  # somebody else has found the port
                    connection = listener.accept()
                    _keep_alive(connection)
                    found[int(connection.recv_bytes())] = connection
        return found

    def store(self) -> Store:
        return self._store

    def fate(self, rank: int) -> str:
        del rank
        return "has ended"

    def close(self) -> None:
        pass


def meet_leader(place: Place) -> tuple[Connection, Store]:
    """Rank 0, from the side of another rank that torchrun has started."""
    store, *_ = next(rendezvous("env://"))
    port, key = store.get(_ADDRESS).decode().split()
    connection = Client((_leaders_host(), int(port)), authkey=bytes.fromhex(key))
    _keep_alive(connection)
    connection.send_bytes(str(place.rank).encode())
    return connection, store


def hang_up(connection: Connection) -> None:
    """Close a connection, also where another thread waits for it: as long as one does, closing alone tells nobody."""
    if not connection.closed:
        with socket.socket(fileno=socket.dup(connection.fileno())) as end, suppress(OSError):  # gone already
            end.shutdown(socket.SHUT_RDWR)
        connection.close()


def _leaders_host() -> str:
    """Where rank 0 is, as torchrun says."""
    return os.environ["MASTER_ADDR"]


def _keep_alive(connection: Connection) -> None:
    """Have the kernel notice within half a minute that the other machine is gone."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
