"""Two replicas on two nodes, asked over HTTP: what a client sees of them, also while one dies, is full or goes. With
the tests' tiny model, and all of it again with the embedded one.

Order matters in one place: the last test ends the server.
"""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from model_patches.loading.cache import default_cache_dir
from model_patches.loading.source import resolve_model
from tests.model_patches.loading.conftest import tiny_folder, tiny_model
from tests.serving import real_server, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]

ROOT = Path(__file__).parents[3]
DEADLINE = 300.0  # seconds; a guard against hanging
MAX_RUNNING, MAX_QUEUED = 4, 16
ENGINE = "ray::ServeReplica:ropewalk:engine"


@dataclass(frozen=True)
class Served:
    """A model, and what has to suit it.

    Attributes:
        model: its folder.
        kv_cache_memory: room for four of the long requests, and more.
        long_prompt: words that are more tokens than the native length.
    """

    model: Path
    kv_cache_memory: str
    long_prompt: int

    @property
    def settings(self) -> dict[str, Any]:
        limits = {"max_running": MAX_RUNNING, "max_queued": MAX_QUEUED}
        return {"native_length": 1024, "kv_cache_memory": self.kv_cache_memory, **limits}

    def mixed(self, number: int, tokens: int = 60) -> dict[str, Any]:
        """Requests of several lengths, every other one streamed, every fifth beyond the native length."""
        words = self.long_prompt if number % 5 == 0 else 3 + number % 40
        prompt = f"{number} " + "the " * words
        return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": number % 2 == 0, "temperature": 0}


@dataclass
class Replicas:
    """The running server.

    Attributes:
        process: `ropewalk serve`.
        url: where it listens.
        log: what it has written.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def __post_init__(self) -> None:
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE, trust_env=False, limits=limits)

    def engines(self) -> list[psutil.Process]:
        """The replicas' processes."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if any(ENGINE in part for part in _cmdline(child))]

    def samples(self, name: str) -> dict[str, dict[str, float]]:
        """Of one metric: by replica, its samples by their other labels."""
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name:
                    others = ",".join(value for label, value in sorted(sample.labels.items()) if label != "replica")
                    found[sample.labels["replica"]][others] = sample.value
        return found

    def names(self) -> set[str]:
        """The replicas that are ready."""
        return {name for name, values in self.samples("ropewalk_ready").items() if values[""] == 1}

    def finished(self, reason: str) -> float:
        """Requests that ended so, with all replicas that run."""
        return sum(values[reason] for values in self.samples("ropewalk_request_success_total").values())

    def is_idle(self) -> bool:
        running, waiting = "ropewalk_num_requests_running", "ropewalk_num_requests_waiting"
        return not any(value[""] for name in (running, waiting) for value in self.samples(name).values())


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="module", params=["tiny", "embedded"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The tests' tiny model, which writes nonsense at once, and the embedded one."""
    if request.param == "embedded":
        return Served(resolve_model(None, cache_dir=default_cache_dir()), "200MB", long_prompt=1100)
    make, write = (fixture._get_wrapped_function() for fixture in (tiny_model, tiny_folder))
    return Served(write(make(), tmp_path_factory.mktemp("replicas")), "20MB", long_prompt=350)


@pytest.fixture(scope="module")
def replicas(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = [part for name, value in served.settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "tests.service.replicas.cluster", str(served.model), "--ray", "2", *options]
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    running = Replicas(process, f"http://127.0.0.1:{port}", log)
    try:
        end = time.monotonic() + DEADLINE
        while process.poll() is None and b"ready: http" not in log.read_bytes() and time.monotonic() < end:
            time.sleep(0.1)
        assert process.poll() is None, log.read_text()[-5000:]
        assert b"ready: http" in log.read_bytes()
        yield running
    finally:
        running.client.close()
        process.terminate()  # it ends what it has started
        process.wait(DEADLINE)


def spread(work: Callable[[int], Any], count: int, *, at_once: int) -> list[Any]:
    """Do something so many times, so many at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(work, range(count)))


def read(client: httpx.Client, body: dict[str, Any], path: str = "/v1/completions") -> str:
    """How a request ended: `whole`, `length` (a stream to its end), or the code of its error."""
    if not body.get("stream"):
        response = client.post(path, json=body)
        if response.status_code != 200:
            return f"{response.status_code} {response.json()['error']['code']}"
        assert response.json()["usage"]["completion_tokens"] == body["max_tokens"]
        return "whole"
    with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            return f"{response.status_code} {_json(response)['error']['code']}"
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    last = httpx.Response(200, text=events[-2]).json()
    return str(last["error"]["code"]) if "error" in last else str(last["choices"][0]["finish_reason"])


def _json(response: httpx.Response) -> Any:
    response.read()
    return response.json()


def test_an_answer_is_a_single_servers_answer(replicas: Replicas, served: Served) -> None:
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/generate", {"prompt": "the the", "max_tokens": 4, "temperature": 0}),
        ("POST", "/generate", {"prompt": "the", "max_tokens": 0}),
        ("POST", "/v1/completions", {"prompt": "the", "unknown": 1}),
        ("POST", "/v1/completions", {"prompt": "the " * 5000}),
        ("POST", "/tokenize", {"prompt": "the the"}),
        ("POST", "/v1/rope/plan", {"prompt_tokens": 3000, "max_tokens": 5}),
        ("GET", "/v1/models/other", {}),
        ("GET", "/nothing", {}),
        ("GET", "/", {}),
        ("PUT", "/generate", {}),
    ]

    def told(client: httpx.Client, method: str, path: str, body: dict[str, Any]) -> Any:
        response = client.request(method, path, json=body or None, headers={"X-Request-Id": "own-id"})
        names = ("content-type", "x-request-id", "allow", "retry-after")
        headers = {name: response.headers.get(name) for name in names}
        text: Any = response.text
        if path == "/generate" and response.status_code == 200:
            text = {name: value for name, value in response.json().items() if name != "timing"}
        return response.status_code, headers, text

    with real_server(model=str(served.model), **served.settings) as single:
        for case in cases:
            assert told(replicas.client, *case) == told(single.client, *case), case


def test_one_scrape_has_the_metrics_of_all_replicas(replicas: Replicas, served: Served) -> None:
    before = replicas.samples("ropewalk_request_success_total")
    spread(lambda number: read(replicas.client, served.mixed(number, tokens=5)), 40, at_once=8)
    after = replicas.samples("ropewalk_request_success_total")
    assert len(replicas.names()) == 2
    ended = [after[name]["length"] - before[name]["length"] for name in replicas.names()]
    assert sum(ended) == 40
    assert all(ended), "one replica did all the work"


def test_a_client_that_goes_away_cancels_its_request(replicas: Replicas) -> None:
    before = replicas.finished("cancelled")
    body = {"prompt": "the", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
    with replicas.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        replicas.client.post("/generate", json=body, timeout=1.0)
    wait_until(lambda: replicas.finished("cancelled") == before + 2, "both requests are cancelled")
    wait_until(replicas.is_idle, "nothing runs")


def test_a_conversation_returns_to_what_is_cached(replicas: Replicas, served: Served) -> None:
    def converse(client: httpx.Client, number: int) -> tuple[int, int]:
        prompt, looked_for, found = "the the the the the " * 4, 0, 0  # all begin alike
        for turn in range(5):
            prompt += f" conversation {number} turn {turn}: what is this?"
            response = client.post(
                "/generate", json={"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
            )
            assert response.status_code == 200, response.text
            usage = response.json()["usage"]
            looked_for += usage["prompt_tokens"]
            found += usage["prompt_tokens_details"]["cached_tokens"]
            prompt += response.json()["text"]
        return looked_for, found

    def rate(client: httpx.Client) -> float:
        counts = spread(lambda number: converse(client, number), 20, at_once=8)
        looked_for, found = (sum(numbers) for numbers in zip(*counts, strict=True))
        return float(found / looked_for)

    with real_server(model=str(served.model), **served.settings) as single:
        alone = rate(single.client)
    together = rate(replicas.client)
    print(f"hit rate: one server {alone:.3f}, two replicas {together:.3f}")
    assert alone > 0.5
    assert together >= 0.95 * alone


def test_load_beyond_capacity_is_refused_while_the_rest_is_served(replicas: Replicas) -> None:
    ends: list[tuple[float, int, str | None]] = []

    def ask(number: int) -> None:
        response = replicas.client.post(
            "/generate", json={"prompt": f"the {number}", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        )
        ends.append((time.monotonic(), response.status_code, response.headers.get("retry-after")))
        if response.status_code != 200:
            assert response.json()["error"]["code"] == "queue_full"

    spread(ask, 120, at_once=120)
    statuses = Counter(status for _, status, _ in ends)
    print(statuses)
    assert statuses.keys() == {200, 429}
    assert statuses[200] >= 2 * (MAX_RUNNING + MAX_QUEUED) - 4
    assert all(retry is not None for _, status, retry in ends if status == 429)
    last = {kind: max(at for at, status, _ in ends if status == kind) for kind in statuses}
    assert last[429] < last[200], "a refusal took longer than the work"
    wait_until(replicas.is_idle, "nothing runs")


def test_a_replica_that_dies_takes_nothing_along_in_silence(replicas: Replicas, served: Served) -> None:
    victim = replicas.engines()[0]
    done = threading.Semaphore(0)

    def ask(number: int) -> str:
        end = read(replicas.client, served.mixed(number))
        done.release()
        return end

    def kill() -> None:
        for _ in range(60):
            done.acquire()
        victim.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    ends = Counter(spread(ask, 200, at_once=12))
    killer.join()
    print(ends)
    assert not victim.is_running()
    assert ends.total() == 200
    assert ends.keys() <= {"whole", "length", "generation_failed"}
    assert ends["generation_failed"] <= 12
    wait_until(lambda: len(replicas.names()) == 2, "the replica is back")
    assert Counter(spread(ask, 40, at_once=12)).keys() == {"whole", "length"}
    wait_until(replicas.is_idle, "nothing runs")


def test_what_runs_may_end_when_the_server_has_to(replicas: Replicas) -> None:
    begun = threading.Barrier(7)

    def ask(number: int) -> str:
        body = {"prompt": f"the {number}", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
        with replicas.client.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            next(lines)
            begun.wait(DEADLINE)
            return _end_of(lines)

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, number) for number in range(6)]
        begun.wait(DEADLINE)
        replicas.process.send_signal(signal.SIGTERM)
        assert [answer.result(DEADLINE) for answer in answers] == ["length"] * 6
    assert replicas.process.wait(DEADLINE) == 0, replicas.log.read_text()[-3000:]


def _end_of(lines: Iterable[str]) -> str:
    *_, last, done = lines
    assert done == "data: [DONE]"
    event = httpx.Response(200, text=last.removeprefix("data: ")).json()
    return str(event["error"]["code"]) if "error" in event else str(event["choices"][0]["finish_reason"])
