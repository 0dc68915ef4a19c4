"""What `ropewalk serve` does about the other processes of a model that is split."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from service.commands import serve
from service.distributed import group
from service.distributed.leader import Leader
from service.distributed.place import Place
from service.errors import StartupError
from service.settings import Settings
from tests.service.distributed.test_leader import Pipes
from tests.serving import DEADLINE

CPU = torch.device("cpu")


@contextmanager
def leading(monkeypatch: pytest.MonkeyPatch, stopped: list[Exception]) -> Iterator[tuple[Leader, Pipes]]:
    """What serves beside ranks that are the test's."""
    pipes = Pipes()
    monkeypatch.setattr(serve, "StartedRanks", lambda _size, _run: pipes)
    monkeypatch.setattr(group, "join", lambda _place, device, _store: device)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    with serve.leading(Settings.model_validate({"tensor_parallel": 3}), None, stopped.append) as leader:
        assert leader is not None
        leader.gather(Settings.model_validate({}), CPU)
        leader.note_loaded()
        yield leader, pipes


def test_a_model_in_one_process_has_nobody_to_lead() -> None:
    with serve.leading(Settings.model_validate({}), None, lambda error: pytest.fail(str(error))) as leader:
        assert leader is None


def test_a_process_that_cannot_end_after_a_loss_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, statuses, stopped = threading.Event(), [], []  # type: ignore[var-annotated]

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(serve, "SECONDS_AFTER_LOSS", 0.01)
    with leading(monkeypatch, stopped) as (_leader, pipes):
        pipes.theirs[1].close()
        assert ended.wait(DEADLINE)
    assert statuses == [2]
    assert [str(error).split(";")[0] for error in stopped] == ["rank 1 has met its fate 1"]


def test_a_server_that_ends_by_itself_ends_the_others_and_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", pytest.fail)
    monkeypatch.setattr(serve, "SECONDS_AFTER_LOSS", 0)
    stopped: list[Exception] = []
    with leading(monkeypatch, stopped) as (_leader, pipes):
        pipes.heard_by(2)
    assert pipes.heard_by(2) is None
    assert not stopped


def test_a_process_that_torchrun_started_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[Any] = []
    monkeypatch.setattr(serve, "follow", followed.append)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    serve.serve({"tensor_parallel": "2"})
    assert followed == [Place(1, 1, 2, 2)]


def test_another_number_than_torchrun_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StartupError, match="tensor_parallel is 1, but WORLD_SIZE"):
        serve.serve({})
