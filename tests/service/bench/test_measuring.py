"""One request's times are those that the server was told to take."""

from typing import Any

import pytest

from service.bench.endpoints import Chunk, streamed
from service.bench.measuring import Outcome, measure
from service.bench.workload import Job
from service.client import AsyncClient
from service.client.calls import StreamCall
from tests.service.bench.fake_server import FakeServer
from tests.service.bench.virtual_time import approximately, run_virtually

JOB = Job([1, 2, 3], 3, 9)


def call(endpoint: str = "completions", max_tokens: int = 9, *, include_usage: bool = True) -> StreamCall[Chunk]:
    prompt: Any = "a b c" if endpoint == "chat" else [1, 2, 3]
    return streamed(endpoint, prompt, max_tokens, model="org/served", ignore_eos=True, include_usage=include_usage)


def measured(server: FakeServer, asked: StreamCall[Chunk], job: Job = JOB) -> Outcome:
    async def run() -> Outcome:
        async with AsyncClient("http://server.test", transport=server, retries=0) as client:
            return await measure(client, asked, job)

    return run_virtually(run())


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
def test_times_of_one_token_a_chunk(endpoint: str) -> None:
    outcome = measured(FakeServer(first=0.5, between=0.1), call(endpoint))
    assert approximately(outcome.times) == {"ttft": 0.5, "itl": 0.1, "longest_gap": 0.1, "e2e": 1.3}
    assert (outcome.status, outcome.output_tokens, outcome.prompt_tokens, outcome.chunks) == ("succeeded", 9, 3, 9)
    assert outcome.cached_tokens == 3


def test_several_tokens_in_a_chunk_are_counted_by_the_usage() -> None:
    outcome = measured(FakeServer(first=0.5, between=0.1, tokens_per_chunk=4), call())
    assert (outcome.chunks, outcome.output_tokens) == (3, 9)
    assert approximately(outcome.times) == {"ttft": 0.5, "itl": 0.1, "longest_gap": 0.4, "e2e": 1.3}


def test_one_token_has_nothing_between() -> None:
    outcome = measured(FakeServer(), call(max_tokens=1))
    assert approximately(outcome.times) == {"ttft": 0.5, "itl": None, "longest_gap": None, "e2e": 0.5}


def test_without_usage_chunks_are_counted() -> None:
    outcome = measured(FakeServer(has_usage=False, sends_done=False), call())
    assert (outcome.status, outcome.output_tokens, outcome.prompt_tokens) == ("succeeded", 9, 3)
    assert approximately(outcome.times)["itl"] == 0.1


def test_an_answer_without_a_text_has_its_first_token_when_it_ends() -> None:
    outcome = measured(FakeServer(first=0.5), call(max_tokens=0))
    assert approximately(outcome.times)["ttft"] == 0.0
    assert outcome.chunks == 0


@pytest.mark.parametrize(
    ("server", "status", "code"),
    [
        (FakeServer(max_running=0), "refused", "queue_full"),
        (FakeServer(fails_at=(0,)), "failed", "generation_failed"),
        (FakeServer(unknown=("ignore_eos",)), "failed", "invalid_value"),
    ],
)
def test_what_goes_wrong_is_noted(server: FakeServer, status: str, code: str) -> None:
    outcome = measured(server, call())
    assert (outcome.status, outcome.error_code) == (status, code)
    assert outcome.ended >= outcome.started


def test_a_stream_that_breaks_off_has_failed() -> None:
    class Truncated(FakeServer):
        def _pieces(self, path: str, body: dict[str, Any]) -> list[tuple[float, bytes]]:
            return super()._pieces(path, body)[:3]

    outcome = measured(Truncated(), call())
    assert (outcome.status, outcome.error_code) == ("failed", "BrokenAnswerError")
