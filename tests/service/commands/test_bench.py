"""`ropewalk bench` from its command line to its figures, against a server whose every time is known."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from service.__main__ import _parser, main
from service.bench.errors import BenchError
from service.client import UnreachableError
from service.commands.bench import bench
from tests.service.bench.fake_server import FakeServer
from tests.service.bench.virtual_time import run_virtually

URL = "http://server.test/v1"


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROPEWALK_API_KEY", raising=False)


def run(server: FakeServer, *options: str) -> None:
    arguments = vars(_parser().parse_args(["bench", URL, *options]))
    bench(arguments, server, run_virtually)


def figures(server: FakeServer, folder: Path, *options: str) -> dict[str, Any]:
    run(server, *options, "--json", str(folder / "figures.json"))
    told: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return told


def test_figures_of_a_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(first=0.5, between=0.1, tokens_per_chunk=2)
    options = ("--requests", "6", "--concurrency", "3", "--prompt-tokens", "40", "--max-tokens", "11", "--seed", "1")
    told = figures(server, tmp_path, *options, "--slo", "ttft:0.6,itl:0.2")
    assert server.most_running == 3
    summary = told["summary"]
    # Two rounds of three: the first chunk after 0.5 s, five more, each 0.2 s later.
    assert summary["seconds"] == pytest.approx(3.0)
    assert summary["times"]["ttft"]["p99"] == pytest.approx(0.5)
    assert summary["times"]["itl"]["mean"] == pytest.approx(0.1)
    assert summary["times"]["longest_gap"]["mean"] == pytest.approx(0.2)
    assert summary["times"]["e2e"]["p50"] == pytest.approx(1.5)
    assert summary["requests_per_second"] == pytest.approx(2)
    assert summary["output_tokens_per_second"] == pytest.approx(22)
    assert summary["total_tokens_per_second"] == pytest.approx(102)
    assert summary["goodput"] == pytest.approx(2)
    assert (summary["tried"], summary["succeeded"], summary["prompts_off"], summary["ended_early"]) == (6, 6, 0, 0)
    assert told["load"]["model"] == "org/served"
    assert told["load"]["seed"] == 1
    assert [request["started"] for request in told["requests"]] == pytest.approx([0, 0, 0, 1.5, 1.5, 1.5])
    assert {request["output_tokens"] for request in told["requests"]} == {11}
    lines = capsys.readouterr().out.splitlines()
    assert "requests: 6 tried, 6 succeeded, 0 refused, 0 failed in 3.0 s" in lines
    assert ["time", "to", "first", "token,", "s", *["0.5"] * 5] in map(str.split, lines)
    assert ["between", "tokens,", "ms", *["100"] * 5] in map(str.split, lines)
    assert ["output", "tokens", "a", "second", "22"] in map(str.split, lines)
    assert any("100% of requests within ttft ≤ 0.6 s, itl ≤ 0.2 s" in line for line in lines)


def test_a_rate_sends_at_its_own_times(tmp_path: Path) -> None:
    server = FakeServer(first=100)
    options = ("--requests", "40", "--rate", "2", "--prompt-tokens", "5", "--max-tokens", "2", "--warmup", "0")
    told = figures(server, tmp_path, *options, "--seed", "3")
    starts = [request["started"] for request in told["requests"]]
    assert server.most_running == 40  # all are under way before the first answer
    assert 12 < starts[-1] < 30  # 19.5 in the mean
    assert told["load"]["concurrency"] is None
    again = figures(FakeServer(first=100), tmp_path, *options, "--seed", "3")
    assert [request["started"] for request in again["requests"]] == pytest.approx(starts)


def test_warm_up_requests_are_sent_first_and_do_not_count(tmp_path: Path) -> None:
    server = FakeServer()
    told = figures(server, tmp_path, "--requests", "2", "--warmup", "3", "--prompt-tokens", "9", "--max-tokens", "2")
    assert len(server.bodies) == 1 + 3 + 2
    assert told["summary"]["tried"] == 2
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts)


def test_what_is_asked_is_greedy_exact_and_never_ends_early(tmp_path: Path) -> None:
    server = FakeServer(ends_after=1)
    told = figures(server, tmp_path, "--requests", "20", "--prompt-tokens", "30:40", "--max-tokens", "3=1,7:8=2")
    for body in server.bodies[1:]:
        assert (body["temperature"], body["stream"], body["ignore_eos"]) == (0, True, True)
        assert 30 <= len(body["prompt"]) <= 40
        assert body["max_tokens"] in (3, 7, 8)
    assert (told["summary"]["prompts_off"], told["summary"]["ended_early"]) == (0, 0)


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
def test_texts_are_exact_too(tmp_path: Path, endpoint: str) -> None:
    server = FakeServer(overhead=6)
    told = figures(
        server,
        tmp_path,
        *("--endpoint", endpoint, "--text", "--requests", "9", "--prompt-tokens", "20:90", "--max-tokens", "2"),
        *("--shared-prefix-tokens", "15"),
    )
    assert told["summary"]["prompts_off"] == 0
    assert all(20 <= request["prompt_tokens"] <= 90 for request in told["requests"])
    prompts = [body["messages"][0]["content"] if endpoint == "chat" else body["prompt"] for body in server.bodies[1:]]
    assert len({tuple(prompt.split()[:9]) for prompt in prompts}) == 1
    assert len(set(prompts)) == len(prompts)


def test_without_a_seed_every_run_has_prompts_of_its_own(tmp_path: Path) -> None:
    servers = FakeServer(), FakeServer()
    seeds = {
        figures(server, tmp_path, "--requests", "1", "--prompt-tokens", "50")["load"]["seed"] for server in servers
    }
    assert len(seeds) == 2
    assert servers[0].bodies[1]["prompt"] != servers[1].bodies[1]["prompt"]


def test_refusals_and_failures_are_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(max_running=2, fails_at=(2,))
    options = ("--requests", "6", "--concurrency", "3", "--prompt-tokens", "8", "--max-tokens", "3", "--warmup", "0")
    summary = figures(server, tmp_path, *options)["summary"]
    assert summary["refused"] + summary["failed"] + summary["succeeded"] == 6
    assert summary["failed"] == 1
    assert summary["refused"] == summary["errors"]["queue_full"] >= 1
    assert f"errors: generation_failed 1, queue_full {summary['refused']}" in capsys.readouterr().out


def test_a_server_that_knows_less_is_measured_and_its_limits_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FakeServer(unknown=("ignore_eos",), ends_after=2)
    told = figures(server, tmp_path, "--requests", "4", "--prompt-tokens", "8", "--max-tokens", "5")
    assert told["load"]["ignore_eos"] is False
    assert told["summary"]["output_tokens"] == 8
    assert "note: 4 answers ended before --max-tokens" in capsys.readouterr().out
    run(FakeServer(has_usage=False, sends_done=False), "--requests", "4", "--prompt-tokens", "8", "--max-tokens", "5")
    assert "note: 4 answers had no usage: their tokens are counted by chunks" in capsys.readouterr().out


def test_an_interrupt_prints_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(first=1.0, between=0.0)

    def interrupted(coroutine: Coroutine[Any, Any, None]) -> None:
        async def first_seconds() -> None:
            task = asyncio.ensure_future(coroutine)
            await asyncio.sleep(3.5)  # a second each for the first request and the warm-up
            task.cancel()
            await asyncio.wait([task])

        run_virtually(first_seconds())
        raise KeyboardInterrupt

    arguments = _parser().parse_args(["bench", URL, "--requests", "90", "--concurrency", "2", "--max-tokens", "4"])
    with pytest.raises(SystemExit) as ended:
        bench(vars(arguments), server, interrupted)
    assert ended.value.code == 130
    assert "requests: 4 tried, 2 succeeded, 0 refused, 0 failed, 2 unfinished in 1.5 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        (
            FakeServer(key="secret"),
            [],
            r"401 invalid_api_key: a valid key is needed \(--api-key, or \$ROPEWALK_API_KEY\)",
        ),
        (FakeServer(key="secret"), ["--model", "org/served", "--api-key", "wrong"], "401 invalid_api_key"),
        (FakeServer(has_tokenize=False), [], "name a --tokenizer"),
        (FakeServer(), ["--prompt-tokens", "5", "--shared-prefix-tokens", "5"], "--prompt-tokens 5"),
        (
            FakeServer(fails_at=tuple(range(1, 99))),
            ["--requests", "2"],
            "no request succeeded; the first: 200 generation",
        ),
        (FakeServer(), ["--requests", "1", "--json", "/nowhere/figures.json"], "--json /nowhere/figures.json"),
    ],
)
def test_what_is_wrong_is_one_line(server: FakeServer, options: list[str], message: str) -> None:
    with pytest.raises(BenchError, match=message) as raised:
        run(server, *options)
    assert "\n" not in str(raised.value)


def test_a_key_is_taken_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    run(FakeServer(key="secret"), "--requests", "1", "--api-key", "secret")
    monkeypatch.setenv("ROPEWALK_API_KEY", "other")
    run(FakeServer(key="other"), "--requests", "1")


def test_nobody_there_is_told_so() -> None:
    arguments = _parser().parse_args(["bench", "http://127.0.0.1:1", "--model", "m"])
    with pytest.raises(UnreachableError, match=r"cannot connect to http://127\.0\.0\.1:1"):
        bench(vars(arguments))


@pytest.mark.parametrize(
    "options",
    [
        ["--concurrency", "2", "--rate", "2"],
        ["--requests", "0"],
        ["--requests", "x"],
        ["--rate", "0"],
        ["--rate", "inf"],
        ["--rate", "x"],
        ["--concurrency", "0"],
        ["--prompt-tokens", "0"],
        ["--max-tokens", "5:"],
        ["--slo", "foo:1"],
        ["--warmup", "-1"],
        ["--endpoint", "other"],
        ["--timeout", "0"],
    ],
)
def test_options_that_mean_nothing_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", URL, *options])
    assert ended.value.code == 2
    assert options[-2] in capsys.readouterr().err
