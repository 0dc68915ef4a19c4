"""Rank 0's side of a model that is split: it tells the other ranks what to do, and notices when one of them is lost.

Knows connections and calls. Does not know how the ranks came to be, nor requests: to the engine it is a runner.
"""

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from service import core
from service.distributed import group
from service.distributed.calls import Call, Copy, Forward, Rerotate
from service.distributed.meeting import Meeting, hang_up
from service.engine.runner import ModelRunner
from service.errors import RankLostError, StartupError
from service.settings import Settings

logger = logging.getLogger(__name__)

SECONDS_TO_TELL = 2.0  # between a collective that fails here and the news which rank has gone
SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_TO_BLAME = 0.3  # a rank that dies takes others with it, which say so: it is the one to be named
_SECRETS = frozenset({"api_key"})  # of no use to a rank that serves nobody


class Leader:
    """The other ranks, as rank 0 has them.

    A rank that is lost ends all of them: what it had of the model is nowhere else. So does a step that fails on any
    rank, for the others may be waiting for it in the middle of theirs.
    """

    def __init__(self, meeting: Meeting, on_loss: Callable[[Exception], None]) -> None:
        """
        Args:
            meeting: with the other ranks.
            on_loss: called once, in a thread of its own, when one is lost; not while all of them are being ended.
        """
        self.place = meeting.place
        self._meeting = meeting
        self._on_loss = on_loss
        self._connections: dict[int, Connection] = {}
        self._lost: RankLostError | None = None
        self._lock = threading.Lock()
        self._is_lost = threading.Event()
        self._is_closing = False
        self._are_loaded = False

    def gather(self, settings: Settings, device: torch.device) -> torch.device:
        """Have the others load what this process is about to load, and join them.

        Returns:
            The device of this rank.

        Raises:
            RankLostError: one of them ended meanwhile.
        """
        self._connections = self._meeting.connections()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        self._send({name: getattr(settings, name) for name in Settings.model_fields if name not in _SECRETS})
        with self.together():
            return self._unless_lost(lambda: group.join(self.place, device, self._meeting.store()))

    def note_loaded(self) -> None:
        """All ranks have loaded: from here on the others do nothing but listen."""
        self._are_loaded = True

    def tell(self, call: Call) -> None:
        """Have the others carry out a call.

        Raises:
            RankLostError: one of them is lost.
        """
        self._send(call)

    @contextmanager
    def together(self) -> Iterator[None]:
        """For what all ranks do at once: an error in it ends them all.

        Raises:
            StartupError: as it came: the server, and the others with it, ends anyway.
            RankLostError: in place of any other error.
        """
        try:
            yield
        except StartupError:
            raise
        except Exception as error:
            if not self._is_lost.wait(SECONDS_TO_TELL):
                self._lose(f"rank 0 failed, and the others with it: {type(error).__name__}: {error}")
            raise self._loss() from error

    def close(self) -> None:
        """End the other ranks; returns when those that this process started have ended."""
        self._is_closing = True
        # While the others load, they may wait for this one in a collective, where they hear no last word.
        if self._are_loaded and not self._is_lost.is_set():
            with suppress(RankLostError):
                self._send(None)
            dist.destroy_process_group()
        for connection in self._connections.values():
            hang_up(connection)
        self._meeting.close()

    def _unless_lost(self, work: Callable[[], torch.device]) -> torch.device:
        """What waits for the others to come, in a thread of its own: left to itself when one of them is lost, for then
        it waits for long."""
        done: Future[torch.device] = Future()

        def attempt() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - it is raised where it can be handled
                done.set_exception(error)

        threading.Thread(target=attempt, name="join", daemon=True).start()
        while not done.done():
            if self._is_lost.wait(SECONDS_BETWEEN_LOOKS):
                raise self._loss()
        return done.result()

    def _send(self, message: Any) -> None:
        if self._is_lost.is_set():
            raise self._loss()
        content = pickle.dumps(message)
        for rank, connection in self._connections.items():
            try:
                connection.send_bytes(content)
            except OSError as error:
                self._lose(f"rank {rank} {self._meeting.fate(rank)}")
                raise self._loss() from error

    def _watch(self) -> None:
        """Wait for the first word of another rank, which is its last: they speak only of their failure."""
        wait(list(self._connections.values()))
        time.sleep(SECONDS_TO_BLAME)
        words = {rank: _last_word(connection) for rank, connection in self._connections.items()}
        if silent := [rank for rank, word in words.items() if word == ""]:
            self._lose(f"rank {silent[0]} {self._meeting.fate(silent[0])}")
        for rank, word in words.items():
            if word:
                self._lose(f"rank {rank} failed: {word}")

    def _lose(self, what: str) -> None:
        with self._lock:
            if self._is_closing or self._lost is not None:
                return
            self._lost = RankLostError(f"{what}; all ranks of a model end together (tensor_parallel {self.place.size})")
        self._is_lost.set()
        logger.error("%s", self._lost)
        self._on_loss(self._lost)

    def _loss(self) -> RankLostError:
        return self._lost or RankLostError("the ranks of the model are being ended")


def _last_word(connection: Connection) -> str | None:
    """What a rank has said of its failure, nothing if it has ended without a word; None if it is there."""
    try:
        return connection.recv_bytes().decode() if connection.poll() else None
    except (EOFError, OSError):
        return ""


class LeadingRunner:
    """The engine's runner over a split model: each call goes to the other ranks, then to rank 0's own runner."""

    def __init__(self, runner: ModelRunner, leader: Leader) -> None:
        self._runner = runner
        self._leader = leader

    def forward(self, step: Mapping[core.Sequence, int]) -> torch.Tensor:
        self._leader.tell(Forward.of(step))
        with self._leader.together():
            return self._runner.forward(step)

    def rerotate(self, rerotation: core.Rerotation) -> None:
        self._leader.tell(Rerotate.of(rerotation))
        self._runner.rerotate(rerotation)

    def copy(self, copies: Sequence[core.PageCopy]) -> None:
        self._leader.tell(Copy.of(copies))
        self._runner.copy(copies)
