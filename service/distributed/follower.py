"""A rank that serves nobody: it loads its part of the model and carries out what rank 0 says, until that says no more.

Knows the parts of a server that compute. It ends when rank 0 ends, whatever it is doing.
"""

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from service import build, logs, process
from service.distributed import group
from service.distributed.meeting import meet_leader
from service.distributed.place import Place
from service.errors import RopewalkError
from service.settings import Settings

logger = logging.getLogger(__name__)

FAILED = 1


def follow(place: Place) -> None:
    """Be a rank that torchrun has started."""
    connection, store = meet_leader(place)
    serve_leader(place, connection, lambda: store)


def serve_leader(place: Place, connection: Connection, store: Callable[[], Store]) -> None:
    """Load what rank 0 loads and carry out its calls.

    Args:
        place: of this process.
        connection: to rank 0.
        store: that all ranks share.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach rank 0 too, which lets requests finish first
        signal.signal(number, signal.SIG_IGN)
    messages: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), name="leader", daemon=True).start()
    try:
        _run(place, messages, store)
    except Exception as error:
        if not isinstance(error, RopewalkError):  # those say all that there is to say
            logger.exception("rank %d failed", place.rank)
        with suppress(OSError):  # rank 0 may have ended before it
            connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        sys.exit(FAILED)


def _run(place: Place, messages: "SimpleQueue[Any]", store: Callable[[], Store]) -> None:
    settings = Settings.model_construct(**messages.get())
    logs.configure("debug" if settings.log_level == "debug" else "warning", settings.log_format)
    inspected = build.inspect(settings)
    inspected = replace(inspected, device=group.join(place, inspected.device, store()))
    runner = build.load_runner(settings, inspected, place).runner
    process.settle()
    while (call := messages.get()) is not None:
        call.carry_out(runner)
    dist.destroy_process_group()


def _receive(connection: Connection, messages: "SimpleQueue[Any]") -> None:
    """Hand on what rank 0 says, up to the None that is its last word. Where it falls silent without, there is nobody
    left to work for, and perhaps somebody in a collective to wait for who never comes."""
    message: Any = connection
    while message is not None:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(FAILED)
        messages.put(message)
