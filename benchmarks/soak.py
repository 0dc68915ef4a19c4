"""A server under mixed load for a long while: is any request lost, does memory or any other resource grow?

Starts the program itself, with the embedded model, a small cache and a short native length, so that pages run out and
plans grow all the time. Callers that chat, stream, branch, constrain, run into deadlines, leave in the middle and send
nonsense keep it busy; every ten seconds its resources are read. Of every request it is known how it has to end; one
that ends in no way at all is lost.

    python benchmarks/soak.py [--minutes 20] [--callers 16] [--out benchmarks/soak]

writes <out>.json and <out>.md and ends with status 1 if a request was lost, failed, or ended as it should not.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

MODEL_LENGTH, NATIVE_LENGTH = 1024, 256
SETTINGS = {
    "native-length": NATIVE_LENGTH,
    "max-model-len": MODEL_LENGTH,
    "kv-cache-memory": "64MiB",
    "max-running": 16,
    "max-queued": 16,
    "max-batch-tokens": 128,
    "prefix-reuse": "rerotate",
    "client-timeout-seconds": 600,
    "port": 0,
}
SECONDS_BETWEEN_SAMPLES = 10.0
SECONDS_TO_ANSWER = 900.0  # longer than any request can take here; then it is lost
WORDS = "the sea at night was calm and a ship with seven sails went over hills of water to find an island".split()  # noqa: SIM905
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
BAD_BODIES = (
    *(
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "max_tokens": -1}',
    ),
    *(
        b'{"prompt": "a", "max_tokens": -1}',
        b'{"prompt": "a", "unknown": 1}',
        b'{"prompt": []}',
        b'{"prompt": "a", "rope": {"scheme": "none"}}',
    ),
)

Body = dict[str, Any]


@dataclass
class Tally:
    """How requests ended.

    Attributes:
        tried: requests begun.
        ended: how many ended in which way: succeeded, cancelled (their caller left), expired (their own deadline),
            refused (429 or 400), failed (500 or an error event), lost (no answer, or one that broke off).
        kinds: the same for each kind of load.
        surprises: requests that ended otherwise than they had to, at most a hundred.
    """

    tried: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    surprises: list[str] = field(default_factory=list)

    def count(self, kind: str, end: str, allowed: frozenset[str], detail: str) -> None:
        """Count one request.

        Args:
            kind: of the load.
            end: how it ended.
            allowed: how it may end.
            detail: what is to be known if that was not allowed.
        """
        self.ended[end] += 1
        self.kinds.setdefault(kind, Counter())[end] += 1
        if end not in allowed and len(self.surprises) < 100:
            self.surprises.append(f"{kind}: {end}: {detail[:300]}")


@dataclass(frozen=True)
class Sample:
    """The server's resources at one moment.

    Attributes:
        seconds: since the load began.
        rss_bytes: resident memory.
        fds: open file descriptors.
        threads: of the process.
        used_bytes: of the cache's pages that requests hold.
        kept_bytes: of pages that are kept to be found again.
        evictions: pages that were kept and had to make room, so far.
        running, waiting: requests.
    """

    seconds: float
    rss_bytes: int
    fds: int
    threads: int
    used_bytes: float
    kept_bytes: float
    evictions: float
    running: float
    waiting: float


class Caller:
    """One of many who use the server, one request after the other."""

    def __init__(self, client: httpx.AsyncClient, tally: Tally, seed: int) -> None:
        self._client = client
        self._tally = tally
        self._dice = random.Random(seed)
        self._conversation: list[Body] = []

    async def call_until(self, end: float) -> None:
        """Send requests until a time of the event loop."""
        loads: dict[Callable[[], Awaitable[None]], int] = {
            self.complete: 12,
            self.chat: 12,
            self.stream: 16,
            self.converse: 16,
            self.branch: 8,
            self.constrain: 8,
            self.leave_stream: 12,
            self.leave_answer: 4,
            self.run_out_of_time: 4,
            self.ask_for_tools: 4,
            self.send_nonsense: 8,
            self.send_too_long: 4,
            self.storm: 1,
        }
        while asyncio.get_running_loop().time() < end:
            [load] = self._dice.choices([*loads], [*loads.values()])
            await load()

    async def complete(self) -> None:
        body = {
            "prompt": self._text(5, 300),
            "logprobs": self._dice.choice([None, 3]),
            "echo": self._dice.random() < 0.3,
        }
        await self._ask("completion", "/v1/completions", body)

    async def chat(self) -> None:
        await self._ask("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": self._text(5, 100)}]})

    async def stream(self) -> None:
        path = self._dice.choice(["/generate", "/v1/completions"])
        await self._ask("stream", path, {"prompt": self._text(5, 300), "stream": True})

    async def converse(self) -> None:
        """A conversation that grows with each turn, through every plan, until it does not fit any more."""
        turn = {"role": "user", "content": self._text(10, 60)}
        body = {"messages": [*self._conversation, turn]}
        answer = await self._ask("conversation", "/v1/chat/completions", body, may_be_refused=True)
        if answer is None or "choices" not in answer:
            self._conversation = []
        else:
            self._conversation += [turn, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]

    async def branch(self) -> None:
        prompts = [self._text(5, 80) for _ in range(self._dice.randint(1, 3))]
        body = {"prompt": prompts, "n": self._dice.randint(2, 3), "stream": self._dice.random() < 0.5}
        await self._ask("branching", "/v1/completions", body)

    async def constrain(self) -> None:
        shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        body = {"messages": [{"role": "user", "content": self._text(5, 20)}], "response_format": shape}
        await self._ask("grammar", "/v1/chat/completions", body)

    async def leave_stream(self) -> None:
        body = {"prompt": self._text(5, 300), "stream": True, "ignore_eos": True}
        await self._ask("leaving stream", "/generate", body, leave_after=self._dice.randint(0, 8))

    async def leave_answer(self) -> None:
        """Go away before the answer, which comes in one piece."""
        self._tally.tried += 1
        body = self._with_sampling({"prompt": self._text(5, 300), "ignore_eos": True})
        asking = asyncio.create_task(self._client.post("/generate", json=body))
        done, _ = await asyncio.wait([asking], timeout=self._dice.uniform(0.0, 2.0))
        if done:
            self._note("leaving", asking, frozenset({"succeeded", "refused"}))
            return
        asking.cancel()
        with suppress(asyncio.CancelledError, httpx.HTTPError):
            await asking
        self._tally.count("leaving", "cancelled", frozenset({"cancelled"}), "")

    async def run_out_of_time(self) -> None:
        body = {"prompt": self._text(5, 300), "timeout": 0.3, "stream": self._dice.random() < 0.5, "ignore_eos": True}
        await self._ask("deadline", "/generate", body, others=frozenset({"expired"}))

    async def ask_for_tools(self) -> None:
        body = {"messages": [{"role": "user", "content": "Is it cold?"}], "tools": [TOOL]}
        await self._expect_refusal("tools", "/v1/chat/completions", json.dumps(body).encode())

    async def send_nonsense(self) -> None:
        path = self._dice.choice(["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"])
        await self._expect_refusal("nonsense", path, self._dice.choice(BAD_BODIES))

    async def send_too_long(self) -> None:
        content = json.dumps({"prompt": self._text(MODEL_LENGTH, 3 * MODEL_LENGTH)}).encode()
        await self._expect_refusal("too long", "/generate", content)

    async def storm(self) -> None:
        """More at once than the queue holds."""
        asking = [self._ask("storm", "/generate", {"prompt": self._text(2, 5)}) for _ in range(24)]
        await asyncio.gather(*asking)

    def _text(self, least: int, most: int) -> str:
        return " ".join(self._dice.choices(WORDS, k=self._dice.randint(least, most)))

    def _with_sampling(self, body: Body) -> Body:
        most = self._dice.choice([1, 8, 16, 32, 64])
        return {"max_tokens": most, "seed": self._dice.randrange(2**31), "temperature": 1.0} | body

    async def _ask(
        self,
        kind: str,
        path: str,
        body: Body,
        *,
        leave_after: int | None = None,
        may_be_refused: bool = False,
        others: frozenset[str] = frozenset(),
    ) -> Body | None:
        """Send a request that the server should serve, unless it has too many.

        Args:
            kind: of the load.
            path: the route.
            body: its body, to which length and seed are added.
            leave_after: go away after so many events of the stream.
            may_be_refused: for another reason too.
            others: further ways in which it may end.

        Returns:
            The answer, if it came in one piece.
        """
        self._tally.tried += 1
        body = self._with_sampling(body)
        allowed = frozenset({"succeeded"} if leave_after is None else {"succeeded", "cancelled"}) | others
        end, detail, answer = "lost", "", None
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code == 200 and body.get("stream"):
                    end, detail = await _read_stream(response, leave_after)
                else:
                    detail = (await response.aread()).decode(errors="replace")
                    end = _end_of(response.status_code, detail)
                    answer = json.loads(detail)
                if response.status_code == 429 or (may_be_refused and response.status_code == 400):
                    allowed |= {"refused"}
        except httpx.HTTPError as error:
            detail = repr(error)
        self._tally.count(kind, end, allowed, detail)
        if end == "refused":
            await asyncio.sleep(self._dice.uniform(1.0, 4.0))
        return answer

    async def _expect_refusal(self, kind: str, path: str, content: bytes) -> None:
        self._tally.tried += 1
        asking = asyncio.create_task(self._post(path, content))
        await asyncio.wait([asking])
        self._note(kind, asking, frozenset({"refused"}))

    async def _post(self, path: str, content: bytes) -> httpx.Response:
        return await self._client.post(path, content=content, headers={"Content-Type": "application/json"})

    def _note(self, kind: str, done: asyncio.Task[httpx.Response], allowed: frozenset[str]) -> None:
        try:
            response = done.result()
        except httpx.HTTPError as error:
            self._tally.count(kind, "lost", allowed, repr(error))
        else:
            self._tally.count(kind, _end_of(response.status_code, response.text), allowed, response.text)


async def _read_stream(response: httpx.Response, leave_after: int | None) -> tuple[str, str]:
    """How a stream ended, and its last event. `/generate` names its end, the OpenAI routes close with [DONE]."""
    last, events = "", 0
    if leave_after == 0:
        return "cancelled", last
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return ("failed" if '"error"' in last else "succeeded"), last
        last, events = line, events + 1
        if events == leave_after:
            return "cancelled", last
    event = json.loads(last.removeprefix("data: ") or "{}")
    if "error" in event:
        return ("expired" if event["error"]["code"] == "deadline_exceeded" else "failed"), last
    return ("succeeded" if event.get("finish_reason") else "lost"), last


def _end_of(status: int, text: str) -> str:
    if status == 200:
        return "succeeded"
    if status == 408 and "deadline_exceeded" in text:
        return "expired"
    return "failed" if status >= 500 else "refused"


class Observer:
    """Reads a server's resources now and then."""

    def __init__(self, client: httpx.AsyncClient, pid: int) -> None:
        self._client = client
        self._process = psutil.Process(pid)
        self._start = time.monotonic()
        self.samples: list[Sample] = []

    async def observe(self) -> None:
        """Take a sample every ten seconds, until cancelled."""
        while True:
            self.samples.append(await self.sample())
            await asyncio.sleep(SECONDS_BETWEEN_SAMPLES)

    async def sample(self) -> Sample:
        values = await self.metrics()
        return Sample(
            seconds=round(time.monotonic() - self._start, 1),
            rss_bytes=self._process.memory_info().rss,
            fds=self._process.num_fds(),
            threads=self._process.num_threads(),
            used_bytes=values["ropewalk_kv_cache_used_bytes"],
            kept_bytes=values["ropewalk_kv_cache_kept_bytes"],
            evictions=values["ropewalk_kv_cache_evictions_total"],
            running=values["ropewalk_num_requests_running"],
            waiting=values["ropewalk_num_requests_waiting"],
        )

    async def metrics(self) -> dict[str, float]:
        """What /metrics says now; samples of one name with several labels are added."""
        text = (await self._client.get("/metrics")).text
        values: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] += sample.value
        return values

    async def wait_until_idle(self) -> None:
        """Wait until no request is left and all pages are back."""
        while True:
            now = await self.sample()
            if now.running == now.waiting == now.used_bytes == 0:
                return
            await asyncio.sleep(0.2)


async def soak(url: str, pid: int, minutes: float, callers: int) -> dict[str, Any]:
    """Load a server for so long, and say what came of it."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=callers)
    tally = Tally()
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS_TO_ANSWER, trust_env=False) as own:
        observer = Observer(own, pid)
        before = await observer.sample()
        observing = asyncio.create_task(observer.observe())
        async with httpx.AsyncClient(base_url=url, timeout=SECONDS_TO_ANSWER, trust_env=False, limits=limits) as client:
            end = asyncio.get_running_loop().time() + 60 * minutes
            await asyncio.gather(*(Caller(client, tally, seed).call_until(end) for seed in range(callers)))
            await observer.wait_until_idle()
        observing.cancel()
        await asyncio.sleep(2)  # until the server has seen that the callers' connections are closed
        after, metrics = await observer.sample(), await observer.metrics()
        health = (await own.get("/health")).status_code
    return {
        "minutes": minutes,
        "callers": callers,
        "settings": SETTINGS,
        "tried": tally.tried,
        "ended": dict(tally.ended),
        "kinds": {kind: dict(ends) for kind, ends in sorted(tally.kinds.items())},
        "surprises": tally.surprises,
        "admitted": metrics["ropewalk_request_plan_total"],
        "admitted_and_ended": metrics["ropewalk_request_success_total"],
        "preemptions": metrics["ropewalk_num_preemptions_total"],
        "rerotations": metrics["ropewalk_rerotations_total"],
        "generated_tokens": metrics["ropewalk_generation_tokens_total"],
        "cache_bytes": metrics["ropewalk_kv_cache_bytes"],
        "health": health,
        "before": asdict(before),
        "after": asdict(after),
        "memory": memory_growth(observer.samples),
        "samples": [asdict(sample) for sample in observer.samples],
    }


def memory_growth(samples: list[Sample]) -> dict[str, float] | None:
    """Memory from when every page has been touched on: then pages that are kept have to make room for others. None
    where that did not happen.

    That is after some seconds, when the rarer kinds of load have yet to come with the most that one of their steps
    needs, so growth is told from two minutes later on too.
    """
    touched = next((sample for sample in samples if sample.evictions > 0), None)
    if touched is None:
        return None
    later = [sample for sample in samples if sample.seconds >= touched.seconds + 120] or [samples[-1]]
    end = statistics.median(sample.rss_bytes for sample in samples[-5:])  # single ones move with what is in flight
    return {
        "all_touched_after_seconds": touched.seconds,
        "all_touched_bytes": touched.rss_bytes,
        "two_minutes_later_bytes": later[0].rss_bytes,
        "largest_after_that_bytes": max(sample.rss_bytes for sample in later),
        "end_bytes": end,
    }


def as_markdown(result: dict[str, Any]) -> str:
    """The figures that matter."""
    ended, memory = result["ended"], result["memory"]
    mib = 2**20
    rows = [
        ("requests tried", result["tried"]),
        *((name, ended.get(name, 0)) for name in ("succeeded", "cancelled", "expired", "refused", "failed", "lost")),
        ("ended otherwise than they had to", len(result["surprises"])),
        ("sequences admitted, and ended", f"{result['admitted']:.0f}, {result['admitted_and_ended']:.0f}"),
        ("tokens generated", f"{result['generated_tokens']:.0f}"),
        ("preemptions, re-rotations", f"{result['preemptions']:.0f}, {result['rerotations']:.0f}"),
    ]
    if memory is not None:
        settled = memory["two_minutes_later_bytes"]
        rows += [
            ("memory before the load, MiB", f"{result['before']['rss_bytes'] / mib:.0f}"),
            (
                f"memory when every page had been touched ({memory['all_touched_after_seconds']:.0f} s), MiB",
                f"{memory['all_touched_bytes'] / mib:.0f}",
            ),
            ("memory two minutes later, MiB", f"{settled / mib:.0f}"),
            ("largest after that", f"{memory['largest_after_that_bytes'] / settled - 1:+.1%}"),
            ("at the end, MiB", f"{memory['end_bytes'] / mib:.0f} ({memory['end_bytes'] / settled - 1:+.1%})"),
        ]
    rows += [
        ("file descriptors before, at most, after", _range(result, "fds")),
        ("threads before, at most, after", _range(result, "threads")),
    ]
    lines = [
        "# A soak at mixed load",
        "",
        f"By `python benchmarks/soak.py --minutes {result['minutes']:g} --callers {result['callers']}`: "
        f"SmolLM2-135M-Instruct, native length {NATIVE_LENGTH}, maximum length {MODEL_LENGTH}, "
        f"{result['cache_bytes'] / mib:.0f} MiB of pages.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
    return "\n".join(lines) + "\n"


def _range(result: dict[str, Any], name: str) -> str:
    most = max(sample[name] for sample in result["samples"])
    return f"{result['before'][name]}, {most}, {result['after'][name]}"


def is_sound(result: dict[str, Any]) -> bool:
    """Whether every request ended as it had to, and nothing is left of any."""
    return (
        not result["surprises"]
        and not result["ended"].get("lost")
        and not result["ended"].get("failed")
        and result["tried"] == sum(result["ended"].values())
        and result["admitted"] == result["admitted_and_ended"]
        and result["after"]["used_bytes"] == 0
        and result["after"]["fds"] <= result["before"]["fds"]
        and result["health"] == 200
    )


def main() -> None:
    """Run the soak and write what came of it."""
    parser = argparse.ArgumentParser(description="A server under mixed load for a long while.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "soak")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and so end the server too
    flags = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.txt")
        with log.open("wb") as file:
            server = subprocess.Popen([sys.executable, "-m", "service", "serve", *flags], stderr=file)
        try:
            url = wait_until_ready(server, log)
            result = asyncio.run(soak(url, server.pid, options.minutes, options.callers))
            server.terminate()
            result["exit_status"] = server.wait(120)
        finally:
            server.kill()
            server.wait()
        said = log.read_text(errors="replace")
    result["errors_logged"] = [line[:300] for line in said.splitlines() if " ERROR " in line or "Traceback" in line][
        :20
    ]
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(as_markdown(result))
    print(as_markdown(result))
    for surprise in result["surprises"][:20]:
        print(surprise)
    if not is_sound(result) or result["exit_status"] != 0 or result["errors_logged"]:
        raise SystemExit("the server is not sound: see the JSON file")


def wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The address of a server that has just been started, once it is ready."""
    while server.poll() is None:
        found = re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text(errors="replace"))
        if found and httpx.get(f"{found[1]}/ready", trust_env=False, timeout=60).status_code == 200:
            return found[1]
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')}")


if __name__ == "__main__":
    main()
