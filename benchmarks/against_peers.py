"""Ropewalk against `transformers serve` on the same machine, in the same run, on the same weights in bfloat16.

    python benchmarks/against_transformers.py [--repetitions 5] [--out benchmarks/results]

Both servers run at once and one is busy at a time. Every repetition goes through the points, and at each point through
the servers, in turn; a figure is the median over the repetitions. Prompts are random words, exact in tokens and new in
each request, so that no prefix cache helps. Both serve a copy of the embedded model that has no end token, so that
exactly the asked number of tokens comes out. Only ratios travel between machines.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from model_patches.loading.cache import default_cache_dir
from model_patches.loading.embedded import fetch_default


@dataclass(frozen=True)
class Point:
    """One load: so many requests at once, each of so many prompt and generated tokens."""

    name: str
    requests: int
    prompt_tokens: int
    max_tokens: int


Medians = dict[str, dict[str, dict[str, float]]]
"""Server → point → figure."""

POINTS = [
    Point("one stream, 128 + 128", 1, 128, 128),
    Point("16 at once, 256 + 128", 16, 256, 128),
    Point("4,000-token prompt", 1, 4000, 2),
    Point("7,900-token prompt", 1, 7900, 2),
]


@dataclass(frozen=True)
class Measured:
    """What one request saw, in seconds from its start."""

    first_token: float
    last_token: float


class Prompts:
    """Texts of random words with an exact number of tokens."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._random = random.Random(seed)
        texts = [self._tokenizer.decode([token]) for token in range(1000, 20000)]
        # A word that begins with a space and is one token alone stays one token after another such word.
        self._words = [text for text in texts if text.startswith(" ") and text[1:].isalpha() and text.isascii()]

    def make(self, tokens: int) -> str:
        """A text of so many tokens."""
        text = "".join(self._random.choice(self._words) for _ in range(tokens))
        count = len(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return text if count == tokens else self.make(tokens)


@contextmanager
def endless_model(folder: Path) -> Iterator[Path]:
    """A copy of a model folder whose generation never ends by itself."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / folder.name
        copy.mkdir()
        for file in folder.iterdir():
            if file.name in ("config.json", "generation_config.json"):
                config = json.loads(file.read_text())
                (copy / file.name).write_text(json.dumps({**config, "eos_token_id": 49151}))
            else:
                (copy / file.name).symlink_to(file)
        yield copy


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(command: list[str], url: str, ready_path: str) -> Iterator[None]:
    """A server process, from ready to ended."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        try:
            await_ready(process, url + ready_path, log)
            yield
        finally:
            process.terminate()
            process.wait(60)


def await_ready(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    """Poll until the server answers 200; RuntimeError with the end of its log if it never does."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(f"the server at {url} did not start: {log.read().decode()[-2000:]}")


async def one_request(client: httpx.AsyncClient, url: str, model: str, prompt: str, max_tokens: int) -> Measured:
    """Send a streaming completion and time its tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    start = time.perf_counter()
    async with client.stream("POST", url + "/v1/completions", json=body, timeout=3600) as response:
        response.raise_for_status()
        times = [
            time.perf_counter() - start
            async for line in response.aiter_lines()
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]
        ]
    return Measured(times[0], times[-1])


async def run_point(url: str, model: str, point: Point, prompts: Prompts) -> dict[str, float]:
    """Run one point once.

    Returns:
        Seconds to the first token (median over the requests), seconds between tokens, output tokens a second.
    """
    texts = [prompts.make(point.prompt_tokens) for _ in range(point.requests)]
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=64)) as client:
        done = await asyncio.gather(*(one_request(client, url, model, text, point.max_tokens) for text in texts))
    between = [(each.last_token - each.first_token) / (point.max_tokens - 1) for each in done]
    return {
        "first_token_s": statistics.median(each.first_token for each in done),
        "between_tokens_s": statistics.median(between),
        "output_tokens_per_s": point.requests * point.max_tokens / max(each.last_token for each in done),
    }


def measure(repetitions: int) -> Medians:
    """Start both servers and measure them."""
    folder = fetch_default(default_cache_dir())
    scripts = Path(sys.executable).parent
    with ExitStack() as stack:
        model = stack.enter_context(endless_model(folder))
        ours, theirs = free_port(), free_port()
        servers = {
            "ropewalk": (f"http://127.0.0.1:{ours}", model.name),
            "transformers serve": (f"http://127.0.0.1:{theirs}", str(model)),
        }
        command = [str(scripts / "ropewalk"), "serve", str(model), "--dtype", "bfloat16", "--port", str(ours)]
        stack.enter_context(server(command, servers["ropewalk"][0], "/ready"))
        command = [str(scripts / "transformers"), "serve", str(model), "--dtype", "bfloat16", "--device", "cpu"]
        stack.enter_context(server([*command, "--port", str(theirs)], servers["transformers serve"][0], "/health"))
        prompts = Prompts(folder, seed=0)
        for url, name in servers.values():
            asyncio.run(run_point(url, name, Point("warm-up", 1, 32, 4), prompts))
        return run_points(servers, prompts, repetitions)


def run_points(servers: dict[str, tuple[str, str]], prompts: Prompts, repetitions: int) -> Medians:
    """Go through the points again and again, each server in turn; servers are name → (address, model)."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {p.name: [] for p in POINTS} for name in servers}
    with tqdm(total=repetitions * len(POINTS) * len(servers)) as bar:
        for _ in range(repetitions):
            for point in POINTS:
                for name, (url, model) in servers.items():
                    bar.set_description(f"{name}: {point.name}")
                    runs[name][point.name].append(asyncio.run(run_point(url, model, point, prompts)))
                    bar.update()
    return {name: {point: medians(each) for point, each in points.items()} for name, points in runs.items()}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}


def report(measured: Medians, repetitions: int) -> str:
    """The figures as a Markdown table."""
    rows = [
        ("one stream, 128 + 128", "first_token_s", "first token, ms", 1e3),
        ("one stream, 128 + 128", "between_tokens_s", "between tokens, ms", 1e3),
        ("16 at once, 256 + 128", "output_tokens_per_s", "output tokens a second, all", 1),
        ("16 at once, 256 + 128", "first_token_s", "first token, s", 1),
        ("4,000-token prompt", "first_token_s", "first token, s", 1),
        ("7,900-token prompt", "first_token_s", "first token, s", 1),
    ]
    cores = os.cpu_count()
    lines = [
        f"{cores} cores, {platform.machine()}, torch {torch.__version__}, bfloat16, SmolLM2-135M-Instruct, "
        f"medians of {repetitions}.",
        "",
        "| load | figure | ropewalk | transformers serve | ratio |",
        "|---|---|---|---|---|",
    ]
    for point, key, label, unit in rows:
        ours, theirs = (measured[name][point][key] * unit for name in ("ropewalk", "transformers serve"))
        lines.append(f"| {point} | {label} | {ours:.3g} | {theirs:.3g} | {ours / theirs:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    measured = measure(arguments.repetitions)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "against_transformers.json").write_text(json.dumps(measured, indent=2) + "\n")
    text = report(measured, arguments.repetitions)
    (arguments.out / "against_transformers.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
