"""What HTTP adds to the first token: its time at the client, less the engine's own.

The engine counts from a request's admission to its first token (`timing` of the last event of a /generate stream). What
comes on top is reading and checking the request, tokenising, the way between event loop and engine, and sending the
event; with many streams at once also waiting for each other on the one event loop. The client speaks HTTP by itself
over connections that are open already, and stops the clock before it reads what an event says: a client library takes
longer than what is measured. Client and server share the machine's cores.

    python benchmarks/http_overhead.py [--streams 1,64] [--samples 256] [--out benchmarks/http_overhead]
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from soak import wait_until_ready

SETTINGS = (
    "--port",
    "0",
    "--max-model-len",
    "8192",
    "--kv-cache-memory",
    "512MiB",
    "--max-running",
    "64",
    "--no-prefix-caching",
)
WORDS = 24
MAX_TOKENS = 4
WARM_UPS = 2  # rounds
COLUMNS = ("overhead_ms", "engine_ms", "client_ms")


@dataclass(frozen=True)
class First:
    """The first token of one stream, in seconds: as the client had it, and as the engine counts."""

    client: float
    engine: float


class Connection:
    """One connection to the server, for one stream after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def stream(self, prompt: str) -> First:
        """Ask for a stream and read it to its end."""
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        began = time.perf_counter()
        self._writer.write(head.encode() + b"\r\n\r\n" + content)
        line = await self._next_event()
        first = time.perf_counter() - began
        while (event := json.loads(line.removeprefix(b"data: ")))["finish_reason"] is None:
            line = await self._next_event()
        while await self._reader.readline() != b"0\r\n":  # the last chunk
            pass
        await self._reader.readline()
        return First(first, event["timing"]["time_to_first_token_seconds"])

    async def _next_event(self) -> bytes:
        while not (line := await self._reader.readline()).startswith(b"data: "):
            if not line or (b" 200 " not in line and line.startswith(b"HTTP/")):
                raise SystemExit(f"the server did not stream: {line!r}")
        return line

    def close(self) -> None:
        """Close it."""
        self._writer.close()


async def measure(url: str, streams: int, samples: int) -> list[First]:
    """First tokens of rounds of so many streams, all of a round begun at once."""
    address = urlsplit(url)
    dice = random.Random(streams)
    connections = [
        Connection(*await asyncio.open_connection(address.hostname, address.port, limit=2**20)) for _ in range(streams)
    ]
    firsts: list[First] = []
    for number in range(WARM_UPS + -(-samples // streams)):
        prompts = [" ".join(str(dice.randrange(1000)) for _ in range(WORDS)) for _ in connections]
        asking = [connection.stream(prompt) for connection, prompt in zip(connections, prompts, strict=True)]
        answers = await asyncio.gather(*asking)
        firsts += answers if number >= WARM_UPS else []
    for connection in connections:
        connection.close()
    return firsts


def summary(firsts: list[First]) -> dict[str, Any]:
    """Medians and 95th percentiles, in milliseconds."""
    columns = {
        "overhead": [first.client - first.engine for first in firsts],
        "engine": [first.engine for first in firsts],
        "client": [first.client for first in firsts],
    }
    return {"samples": len(firsts)} | {
        f"{name}_ms": {
            "median": 1000 * statistics.median(seconds),
            "p95": 1000 * statistics.quantiles(seconds, n=20, method="inclusive")[-1],
        }
        for name, seconds in columns.items()
    }


def as_markdown(results: dict[int, dict[str, Any]]) -> str:
    """The figures as a table."""
    lines = [
        "# What HTTP adds to the first token",
        "",
        f"By `python benchmarks/http_overhead.py`: SmolLM2-135M-Instruct on a CPU ({torch.get_num_threads()} threads), "
        f"prompts of {WORDS} short numbers, milliseconds, median and 95th percentile.",
        "",
        "| streams at once | samples | HTTP adds | the engine's own | at the client |",
        "|---|---|---|---|---|",
    ]
    for streams, result in results.items():
        cells = [f"{result[name]['median']:.1f}, {result[name]['p95']:.1f}" for name in COLUMNS]
        lines.append(f"| {streams} | {result['samples']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write what came of it."""
    parser = argparse.ArgumentParser(description="What HTTP adds to the first token.")
    parser.add_argument("--streams", default="1,64", help="streams at a time, several after each other")
    parser.add_argument("--samples", type=int, default=256, help="streams that are measured, of each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "http_overhead")
    options = parser.parse_args()
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.txt")
        with log.open("wb") as file:
            server = subprocess.Popen([sys.executable, "-m", "service", "serve", *SETTINGS], stderr=file)
        try:
            url = wait_until_ready(server, log)
            for streams in map(int, options.streams.split(",")):
                results[streams] = summary(asyncio.run(measure(url, streams, options.samples)))
        finally:
            server.terminate()
            server.wait()
    options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(as_markdown(results))
    print(as_markdown(results))


if __name__ == "__main__":
    main()
