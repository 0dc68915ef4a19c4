"""The embedded model through real HTTP: one request, many at a time under several plans, and the program itself."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from model_patches.plan import PositionPlan
from service.core import Sequence
from service.engine.runner import ModelRunner
from tests.serving import DEADLINE, EventStream, HttpServer, error_of, read_stream, real_server, wait_until

ROOT = Path(__file__).parents[2]
NATIVE = 128
"""Native length of the server in this process; prompts reach three times as far."""


@pytest.fixture(scope="module")
def server(embedded_model_folder: Path) -> Iterator[HttpServer]:
    with real_server(model=str(embedded_model_folder), native_length=NATIVE, kv_cache_memory="1GiB") as running:
        yield running


class TestOneRequest:
    def test_a_greedy_answer_is_the_same_twice_whole_and_streamed(self, server: HttpServer) -> None:
        messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        answers = [server.client.post("/v1/chat/completions", json=body).json() for _ in range(2)]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert "Paris" in texts[0]
        assert texts[1] == texts[0]
        assert read_stream(server.client, "/v1/chat/completions", body).text == texts[0]
        assert answers[0]["choices"][0]["finish_reason"] in ("stop", "length")
        usage = answers[0]["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert (answers[0]["rope"]["mode"], answers[0]["rope"]["factor"]) == ("native", 1.0)
        server.wait_until_idle()

    def test_tokens_and_text_agree(self, server: HttpServer) -> None:
        body = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = server.client.post("/generate", json=body).json()
        assert len(answer["token_ids"]) == 8
        detokenized = server.client.post("/detokenize", json={"tokens": answer["token_ids"]}).json()
        assert detokenized["prompt"].startswith(answer["text"])
        server.wait_until_idle()

    def test_a_json_schema_shapes_the_answer(self, server: HttpServer) -> None:
        properties = {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        body = {
            "messages": [{"role": "user", "content": "Name a city in France, as JSON."}],
            "max_tokens": 64,
            "temperature": 0,
            "logprobs": True,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": schema | {"additionalProperties": False}, "strict": True},
            },
        }
        answer = server.client.post("/v1/chat/completions", json=body).json()
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "stop"
        city = json.loads(choice["message"]["content"])
        assert (list(city), type(city["city"]), type(city["big"])) == (["city", "big"], str, bool)
        tokens = choice["logprobs"]["content"]
        assert len(tokens) == answer["usage"]["completion_tokens"]
        said = b"".join(bytes(token["bytes"]) for token in tokens).decode()
        assert said.removesuffix("<|im_end|>") == choice["message"]["content"]
        server.wait_until_idle()

    def test_a_prompt_beyond_the_maximum_is_refused(self, server: HttpServer) -> None:
        error = error_of(server.client.post("/generate", json={"prompt": [1] * 600}))
        assert error["code"] == "context_length_exceeded"
        assert "600" in error["message"]
        assert str(4 * NATIVE) in error["message"]


@dataclass
class StepRecorder:
    """Notes each step of a runner.

    Attributes:
        plans: the different plans of each step.
        passes: forward passes of the model in each step.
    """

    plans: list[set[PositionPlan]] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    count: int = 0

    @contextmanager
    def attached(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        forward, model_forward = runner.forward, runner.model.forward

        def recorded(step: Mapping[Sequence, int]) -> torch.Tensor:
            before = self.count
            logits = forward(step)
            self.plans.append({sequence.choice.plan for sequence in step})
            self.passes.append(self.count - before)
            return logits

        def counted(*tensors: Any) -> torch.Tensor:
            self.count += 1
            return model_forward(*tensors)

        with monkeypatch.context() as patch:
            patch.setattr(runner, "forward", recorded)
            patch.setattr(runner.model, "forward", counted)
            yield


@dataclass(frozen=True)
class Job:
    """One request of many; its client goes away after so many events, or never."""

    prompt: list[int]
    leave_after: int | None


class TestManyRequests:
    JOBS = 64
    MAX_TOKENS = 16

    def jobs(self) -> list[Job]:
        dice = random.Random(4)
        lengths = [dice.choice([10, 40, 100, 120, 140, 180, 250, 300]) + dice.randrange(8) for _ in range(self.JOBS)]
        leaving = set(dice.sample(range(self.JOBS), self.JOBS // 4))
        return [
            Job(
                prompt=[dice.randrange(100, 40_000) for _ in range(length)],
                leave_after=dice.randrange(6) if number in leaving else None,
            )
            for number, length in enumerate(lengths)
        ]

    async def ask(self, client: httpx.AsyncClient, job: Job) -> EventStream:
        body = {"prompt": job.prompt, "max_tokens": self.MAX_TOKENS, "ignore_eos": True, "seed": 1, "stream": True}
        stream = EventStream()
        async with client.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200
            if job.leave_after == 0:
                return stream
            async for line in response.aiter_lines():
                stream.read(line)
                if len(stream.data) == job.leave_after:
                    break
        return stream

    async def ask_all(self, url: str, jobs: list[Job]) -> list[EventStream]:
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE, trust_env=False) as client:
            return await asyncio.gather(*(self.ask(client, job) for job in jobs))

    def test_mixed_plans_share_steps_and_every_request_ends_once(
        self, server: HttpServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert server.loaded is not None
        runner = server.loaded.engine._engine._runner
        assert isinstance(runner, ModelRunner)
        before = totals(server)
        jobs, recorder = self.jobs(), StepRecorder()
        with recorder.attached(runner, monkeypatch):
            streams = asyncio.run(self.ask_all(server.url, jobs))
            server.wait_until_idle()

        for job, stream in zip(jobs, streams, strict=True):
            assert not any(event["finish_reason"] for event in stream.data[:-1])
            if job.leave_after is None:
                self.assert_complete(job, stream)

        assert max(map(len, recorder.plans)) >= 3
        assert set(recorder.passes) == {1}
        after = totals(server)
        gained = {name: after[name] - before[name] for name in after}
        staying = sum(job.leave_after is None for job in jobs)
        assert gained["admitted"] == gained["ended"] == self.JOBS
        assert gained["error"] == 0
        assert gained["length"] >= staying
        assert gained["cancelled"] > 0
        assert gained["steps"] == len(recorder.passes)
        assert after["used"] == 0

    def assert_complete(self, job: Job, stream: EventStream) -> None:
        """A terminal event is the last, and nothing is lost before it."""
        last = stream.data[-1]
        assert last["finish_reason"] == "length"
        tokens = [token for event in stream.data for token in event["token_ids"]]
        assert last["usage"]["prompt_tokens"] == len(job.prompt)
        assert last["usage"]["completion_tokens"] == len(tokens) > 0
        assert last["rope"]["factor"] >= len(job.prompt) / NATIVE
        if len(job.prompt) + self.MAX_TOKENS <= NATIVE:
            assert last["rope"]["mode"] == "native"
            assert len(tokens) == self.MAX_TOKENS


def totals(server: HttpServer) -> dict[str, float]:
    """Counters of a server that a run of requests moves."""
    samples = server.samples()
    ended = {
        reason: samples[f"ropewalk_request_success_total{{finished_reason={reason}}}"]
        for reason in ("stop", "length", "cancelled", "error")
    }
    admitted = sum(value for name, value in samples.items() if name.startswith("ropewalk_request_plan_total"))
    return ended | {
        "ended": sum(ended.values()),
        "admitted": admitted,
        "steps": samples["ropewalk_iteration_tokens_count"],
        "used": samples["ropewalk_kv_cache_used_bytes"],
    }


@dataclass
class Program:
    """`python -m service serve` in a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    @contextmanager
    def client_once_ready(self) -> Iterator[httpx.Client]:
        """A client of the program, once it is ready."""
        address = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
        wait_until(lambda: bool(address.search(self.said)) or self.has_ended, "the program listens")
        found = address.search(self.said)
        assert found, self.said
        with httpx.Client(base_url=found[1], timeout=DEADLINE, trust_env=False) as client:
            wait_until(lambda: self.has_ended or client.get("/ready").status_code == 200, "the program is ready")
            yield client

    @property
    def said(self) -> str:
        return self.log.read_text()

    def stream_and_terminate(self, body: dict[str, Any]) -> EventStream:
        """What a stream brings to its end, when SIGTERM comes after its first token."""
        stream = EventStream()
        with self.client_once_ready() as client, client.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                stream.read(line)
                if len(stream.data) == 1 and line:
                    self.process.send_signal(signal.SIGTERM)
        return stream

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


@contextmanager
def program(tmp_path: Path, *arguments: str) -> Iterator[Program]:
    log = tmp_path / "log.txt"
    command = [sys.executable, "-m", "service", "serve", *arguments, "--port", "0"]
    with log.open("wb") as file, subprocess.Popen(command, cwd=ROOT, stderr=file) as process:
        try:
            yield Program(process, log)
        finally:
            process.kill()


class TestProgram:
    SETTINGS = ("--max-model-len", "1024", "--kv-cache-memory", "256MiB", "--shutdown-seconds", "100")

    def test_it_serves_and_ends_with_status_0_on_sigterm(self, embedded_model_folder: Path, tmp_path: Path) -> None:
        with program(tmp_path, str(embedded_model_folder), *self.SETTINGS) as running:
            with running.client_once_ready() as client:
                body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, running.said
                assert answer.json()["choices"][0]["text"]
                running.process.send_signal(signal.SIGTERM)
                assert running.process.wait(DEADLINE) == 0, running.said
            assert "Traceback" not in running.said

    def test_on_sigterm_a_running_stream_is_finished_first(self, embedded_model_folder: Path, tmp_path: Path) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with program(tmp_path, str(embedded_model_folder), *self.SETTINGS) as running:
            stream = running.stream_and_terminate(body)
            assert running.process.wait(DEADLINE) == 0, running.said
            assert "Traceback" not in running.said
        assert stream.data[-1]["finish_reason"] == "length"
        assert stream.data[-1]["usage"]["completion_tokens"] == 200

    def test_a_stream_that_does_not_finish_in_time_is_told_so(
        self, embedded_model_folder: Path, tmp_path: Path
    ) -> None:
        settings = ("--max-model-len", "8192", "--kv-cache-memory", "256MiB", "--shutdown-seconds", "1")
        body = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with program(tmp_path, str(embedded_model_folder), *settings) as running:
            stream = running.stream_and_terminate(body)
            assert running.process.wait(DEADLINE) == 0, running.said
        assert stream.data[-1]["error"]["code"] == "cancelled"

    def test_a_model_that_cannot_be_loaded_ends_it_with_one_line_and_status_2(
        self, embedded_model_folder: Path, tmp_path: Path
    ) -> None:
        """The weights are missing, which shows only after the port is open."""
        folder = tmp_path / "hollow"
        folder.mkdir()
        config = json.loads((embedded_model_folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config))
        with program(tmp_path, str(folder)) as running:
            assert running.process.wait(DEADLINE) == 2, running.said
            last = running.said.splitlines()[-1]
            assert last.startswith("ropewalk: error: ")
            assert "no weights" in last
            assert "Traceback" not in running.said
