"""The program with a model that is split over two processes of this machine, as a user starts it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.test_embedded import Program, program
from tests.service.evaluation.tiny import save_tiny
from tests.serving import DEADLINE, EventStream, real_server

pytestmark = pytest.mark.long

SETTINGS: dict[str, Any] = {"dtype": "float32", "native_length": 16, "kv_cache_memory": 2**24}
BODIES = [
    {"prompt": "The sky", "max_tokens": 5},
    {"prompt": "Once upon a time", "max_tokens": 40},  # grows
    {"prompt": "There was a king who had three sons", "max_tokens": 20, "rope": {"scheme": "ntk", "factor": 4}},
]
ENDLESS = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}


@contextmanager
def split_program(tmp_path: Path) -> Iterator[Program]:
    """The program over the tiny model; no process is left behind when it has ended."""
    arguments = [text for name, value in SETTINGS.items() for text in ("--" + name.replace("_", "-"), str(value))]
    with program(tmp_path, str(save_tiny(tmp_path / "tiny")), *arguments, "--tensor-parallel", "2") as running:
        yield running
        children = psutil.Process(running.process.pid).children() if not running.has_ended else []
        running.process.wait(DEADLINE)
        assert psutil.wait_procs(children, DEADLINE)[1] == []


def test_answers_are_those_of_one_process_and_sigterm_ends_both(tmp_path: Path) -> None:
    with split_program(tmp_path) as running, running.client_once_ready() as client:
        answers = [client.post("/generate", json={**body, "temperature": 0, "ignore_eos": True}) for body in BODIES]
        with real_server(model=str(tmp_path / "tiny"), device="cpu", **SETTINGS) as whole:
            for body, answer in zip(BODIES, answers, strict=True):
                expected = whole.client.post("/generate", json={**body, "temperature": 0, "ignore_eos": True}).json()
                assert answer.status_code == 200, running.said
                assert answer.json()["token_ids"] == expected["token_ids"]
                assert answer.json()["rope"] == expected["rope"]
        assert answers[1].json()["rope"]["rerotations"] >= 3
        stream = EventStream()
        with client.stream("POST", "/generate", json=ENDLESS) as response:
            for number, line in enumerate(response.iter_lines()):
                stream.read(line)
                if number == 0:
                    running.process.send_signal(signal.SIGTERM)
        assert stream.data[-1]["finish_reason"] == "length"
        assert running.process.wait(DEADLINE) == 0, running.said


def test_a_lost_rank_ends_requests_with_an_error_and_the_program_with_its_name(tmp_path: Path) -> None:
    with split_program(tmp_path) as running, running.client_once_ready() as client:
        [rank] = [
            child
            for child in psutil.Process(running.process.pid).children()
            if "multiprocessing.spawn" in " ".join(child.cmdline())
        ]
        stream = EventStream()
        with client.stream("POST", "/generate", json=ENDLESS) as response:
            for number, line in enumerate(response.iter_lines()):
                stream.read(line)
                if number == 0:
                    rank.kill()
        assert stream.data[-1]["error"]["code"] == "generation_failed", stream.data[-1]
        assert running.process.wait(DEADLINE) == 2
        assert running.said.endswith(
            "ropewalk: error: rank 1 was ended by SIGKILL; all ranks of a model end together (tensor_parallel 2)\n"
        )
