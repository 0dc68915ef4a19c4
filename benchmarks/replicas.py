"""What replicas on Ray give and cost: throughput of two over one, the way through Ray, and the time after a kill.

Every replica has one core. The servers run one after the other, each is warmed up, and the same requests are sent to
all: prompts of some hundred tokens, sixteen at a time. The way through Ray is the difference between one replica and
the server without Ray, for requests of one token that are sent one after the other, with a short prompt and with one of
4,000 characters, which the front tokenises too. Run it on an idle machine of two cores or more, with the extra ray:

    python benchmarks/replicas.py [--model FOLDER] [--requests 48] [--tokens 64] [--out benchmarks/replicas]
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import psutil

AT_ONCE = 16
LONG_PROMPT = 4000  # characters
SECONDS_TO_START = 300
ENGINE = "ray::ServeReplica:ropewalk:engine"
TEXT = "\n\n".join(topics[name] for name in sorted(topics))


@contextmanager
def server(model: str | None, *options: str) -> Iterator[tuple[httpx.Client, int]]:
    """A running server, and the id of its process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "service", "serve", *([model] if model else []), "--port", str(port), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, trust_env=False)
        try:
            wait_for(lambda: client.get("/ready").status_code == 200, process)
            yield client, process.pid
        finally:
            client.close()
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def wait_for(holds: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> float:
    """Seconds until something holds."""
    begun = time.perf_counter()
    while True:
        if process is not None and process.poll() is not None:
            raise SystemExit(f"the server has ended with {process.returncode}")
        try:
            if holds():
                return time.perf_counter() - begun
        except httpx.HTTPError:
            pass
        if time.perf_counter() - begun > SECONDS_TO_START:
            raise SystemExit("waited too long")
        time.sleep(0.05)


def body(number: int, tokens: int, characters: int = 800) -> dict[str, Any]:
    """A request whose prompt no other one shares."""
    start = number * 977 % (len(TEXT) - characters)
    prompt = f"{number}: {TEXT[start : start + characters]}"
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


def throughput(client: httpx.Client, requests: int, tokens: int, first: int = 0) -> float:
    """Generated tokens a second."""

    def ask(number: int) -> None:
        client.post("/generate", json=body(first + number, tokens)).raise_for_status()

    begun = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, range(requests)))
    return requests * tokens / (time.perf_counter() - begun)


def latencies(client: httpx.Client, characters: int, first: int, count: int = 40) -> float:
    """Median milliseconds of requests for one token whose prompts are cached, so that little but the way is left."""
    times = []
    request = body(first, 1, characters)
    for _ in range(count):
        begun = time.perf_counter()
        client.post("/generate", json=request).raise_for_status()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[5:])


def engines(pid: int) -> list[psutil.Process]:
    """The replicas' processes."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if ENGINE in " ".join(child.cmdline())]


def recovery(client: httpx.Client, pid: int) -> dict[str, float]:
    """Seconds after a kill until the next answer, and until there are two replicas again."""
    engines(pid)[0].kill()
    begun = time.perf_counter()
    client.post("/generate", json=body(9000, 1)).raise_for_status()
    answered = time.perf_counter() - begun
    wait_for(lambda: client.get("/metrics").text.count("\nropewalk_ready{") < 2)
    wait_for(lambda: client.get("/metrics").text.count("\nropewalk_ready{") == 2)
    return {"answer": answered, "two_again": time.perf_counter() - begun}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    result: dict[str, Any] = {"cores": os.cpu_count(), "tokens_per_second": {}, "milliseconds": {}}
    more = ["--max-running", str(AT_ONCE), "--max-model-len", "4096", "--kv-cache-memory", options.kv_cache_memory]
    kinds = {"no Ray": [], "1 replica": ["--ray", "1"], "2 replicas": ["--ray", "2"]}
    for kind, replicas in kinds.items():
        with server(options.model, *more, *replicas) as (client, pid):
            throughput(client, AT_ONCE, 8, first=5000)  # warms up
            result["tokens_per_second"][kind] = throughput(client, options.requests, options.tokens)
            result["milliseconds"][kind] = {
                "short": latencies(client, 40, 7000),
                "long": latencies(client, LONG_PROMPT, 8000),
            }
            if kind == "2 replicas":
                result["recovery_seconds"] = recovery(client, pid)
        print(kind, json.dumps(result, indent=1), file=sys.stderr)
    return result


def as_markdown(result: dict[str, Any]) -> str:
    """A table of what was measured."""
    alone = result["tokens_per_second"]["1 replica"]
    rates, times, after = result["tokens_per_second"], result["milliseconds"], result["recovery_seconds"]
    lines = [
        "# Replicas on Ray",
        "",
        f"By `python benchmarks/replicas.py` on {result['cores']} cores, one for each replica.",
        "",
        "| | no Ray | 1 replica | 2 replicas |",
        "|---|---|---|---|",
        f"| tokens a second, {AT_ONCE} at a time | {' | '.join(f'{rate:.0f}' for rate in rates.values())} |",
        f"| over one replica | {' | '.join(f'{rate / alone:.2f}' for rate in rates.values())} |",
    ]
    lines += [
        f"| ms for one token, cached prompt, {name} | {' | '.join(f'{t[name]:.1f}' for t in times.values())} |"
        for name in ("short", "long")
    ]
    lines += [
        "",
        f"After a kill the next answer came in {after['answer']:.2f} s, from the other replica; after "
        f"{after['two_again']:.0f} s there were two again.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write what came of it."""
    parser = argparse.ArgumentParser(description="What replicas on Ray give and cost.")
    parser.add_argument("--model", help="folder, GGUF file or hub name; default: the embedded default")
    parser.add_argument("--requests", type=int, default=48, help="of the throughput")
    parser.add_argument("--tokens", type=int, default=64, help="that each of them generates")
    parser.add_argument("--kv-cache-memory", default="700MB", help="of each replica")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "replicas")
    options = parser.parse_args()
    result = measure(options)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(as_markdown(result))
    print(as_markdown(result))


if __name__ == "__main__":
    main()
