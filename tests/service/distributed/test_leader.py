"""Rank 0 and ranks that end, without a process or a model: the other ends of pipes are the test's."""

import pickle
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from service.distributed import group
from service.distributed.calls import Forward
from service.distributed.leader import Leader
from service.distributed.place import Place
from service.errors import RankLostError, StartupError
from service.settings import Settings
from tests.serving import DEADLINE

CPU = torch.device("cpu")


class Pipes:
    """A meeting with two ranks that are the test's."""

    def __init__(self) -> None:
        self.place = Place(0, 0, 3, 3)
        self.ours: dict[int, Connection] = {}
        self.theirs: dict[int, Connection] = {}
        for rank in (1, 2):
            self.ours[rank], self.theirs[rank] = Pipe()

    def connections(self) -> dict[int, Connection]:
        return self.ours

    def store(self) -> Store:
        return HashStore()

    def fate(self, rank: int) -> str:
        return f"has met its fate {rank}"

    def close(self) -> None:
        pass

    def heard_by(self, rank: int) -> Any:
        """The next message; EOFError where there will be none."""
        assert self.theirs[rank].poll(DEADLINE), f"rank {rank} waits in vain"
        return pickle.loads(self.theirs[rank].recv_bytes())


class Led:
    """A leader of such ranks, and what it says when one is lost."""

    def __init__(self) -> None:
        self.pipes = Pipes()
        self.lost: SimpleQueue[Exception] = SimpleQueue()
        self.leader = Leader(self.pipes, self.lost.put)
        self.leader.gather(Settings.model_validate({"api_key": "secret", "max_running": 7}), CPU)

    @property
    def loss(self) -> str:
        return str(self.lost.get(timeout=DEADLINE))


@pytest.fixture
def led(monkeypatch: pytest.MonkeyPatch) -> Iterator[Led]:
    monkeypatch.setattr(group, "join", lambda _place, device, _store: device)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    made = Led()
    yield made
    made.leader.close()


def test_a_rank_that_ends_before_all_have_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    come = threading.Event()
    monkeypatch.setattr(group, "join", lambda _place, _device, _store: come.wait(DEADLINE))
    pipes, lost = Pipes(), SimpleQueue[Exception]()
    leader = Leader(pipes, lost.put)
    pipes.theirs[1].close()
    with pytest.raises(RankLostError, match="rank 1 has met its fate"):
        leader.gather(Settings.model_validate({}), CPU)
    assert not come.is_set()
    come.set()
    leader.close()


def test_each_rank_gets_the_settings_but_no_key_and_then_every_call(led: Led) -> None:
    led.leader.tell(Forward([]))
    for rank in (1, 2):
        settings = led.pipes.heard_by(rank)
        assert settings["max_running"] == 7
        assert "api_key" not in settings
        assert led.pipes.heard_by(rank) == Forward([])


def test_the_last_word_to_ranks_that_have_loaded_is_none(led: Led) -> None:
    led.leader.note_loaded()
    time.sleep(0.1)  # so that a thread waits for the connections, as it does in a server
    led.leader.close()
    for rank in (1, 2):
        led.pipes.heard_by(rank)
        assert led.pipes.heard_by(rank) is None
        with pytest.raises(EOFError):
            led.pipes.heard_by(rank)
    assert led.lost.empty()


def test_ranks_that_still_load_hear_no_last_word_for_they_may_not_be_listening(led: Led) -> None:
    led.leader.close()
    for rank in (1, 2):
        led.pipes.heard_by(rank)
        with pytest.raises(EOFError):
            led.pipes.heard_by(rank)
    assert led.lost.empty()


def test_a_rank_that_ends_is_named_and_no_call_goes_out_any_more(led: Led) -> None:
    led.pipes.theirs[2].close()
    assert led.loss == "rank 2 has met its fate 2; all ranks of a model end together (tensor_parallel 3)"
    with pytest.raises(RankLostError, match="rank 2 has met its fate 2"):
        led.leader.tell(Forward([]))
    led.leader.close()
    led.pipes.heard_by(1)
    with pytest.raises(EOFError):  # and so ends too, without a last word
        led.pipes.heard_by(1)


def test_a_rank_that_fails_is_quoted(led: Led) -> None:
    led.pipes.theirs[1].send_bytes(b"StartupError: no room")
    assert led.loss.startswith("rank 1 failed: StartupError: no room; all ranks")


def test_of_a_rank_that_ends_and_one_that_fails_for_it_the_first_is_named(led: Led) -> None:
    led.pipes.theirs[1].send_bytes(b"RuntimeError: Connection reset by peer")
    led.pipes.theirs[2].close()
    assert led.loss.startswith("rank 2 has met its fate 2")
    assert led.lost.empty()


def test_an_error_in_what_all_do_together_is_the_lost_ranks_where_one_is_lost(led: Led) -> None:
    led.pipes.theirs[1].close()
    with pytest.raises(RankLostError, match="rank 1 has met its fate"), led.leader.together():
        raise RuntimeError("Connection reset by peer")


def test_an_error_of_rank_0_alone_ends_all_of_them(led: Led) -> None:
    told = "rank 0 failed, and the others with it: ValueError: odd"
    with pytest.raises(RankLostError, match=told), led.leader.together():
        raise ValueError("odd")
    assert "rank 0 failed" in led.loss


def test_a_server_that_cannot_start_says_why(led: Led) -> None:
    with pytest.raises(StartupError, match="no room"), led.leader.together():
        raise StartupError("no room")
    assert led.lost.empty()
