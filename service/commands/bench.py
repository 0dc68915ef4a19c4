"""`ropewalk bench`: how fast a server is, any that speaks OpenAI's API."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from service.bench.errors import KEY_STATUS, BenchError
from service.bench.report import as_json, table
from service.bench.run import Run, execute
from service.bench.summary import summarize
from service.bench.target import Target, find_target
from service.bench.tokenizers import tokenizer_of
from service.bench.workload import Workload
from service.client import ApiError, AsyncClient

KEY_VARIABLE = "ROPEWALK_API_KEY"
INTERRUPTED = 130  # the exit status that shells give to SIGINT


def bench(
    arguments: Mapping[str, Any],
    transport: httpx.AsyncBaseTransport | None = None,
    run_to_end: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
) -> None:
    """Measure a server and print the figures. Ctrl-C ends it early, with what there is so far.

    Args:
        arguments: of the command line, see `service.bench.options`.
        transport: of httpx, instead of the network.
        run_to_end: runs a coroutine on an event loop, whose time is the time that is measured.

    Raises:
        BenchError: it cannot be measured as asked, or no request succeeded.
        ClientError: it cannot be reached.
    """
    with tqdm(total=arguments["requests"], unit="req", disable=None, leave=False) as bar:
        run, load = Run(on_progress=bar.update), _load(arguments)
        try:
            run_to_end(_measure(run, arguments, load, transport))
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        except ApiError as error:
            if error.status in KEY_STATUS:
                raise BenchError(f"{error} (--api-key, or ${KEY_VARIABLE})") from error
            raise
    _report(run, arguments, load)
    if interrupted:
        sys.exit(INTERRUPTED)
    if not any(outcome.error is None for outcome in run.outcomes):
        raise BenchError(f"no request succeeded; the first: {run.outcomes[0].error}")


def _load(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked of the server, as it is reported."""
    rate = arguments["rate"]
    return {
        "url": arguments["url"],
        "endpoint": arguments["endpoint"],
        "model": arguments["model"],
        "requests": arguments["requests"],
        "concurrency": arguments["concurrency"] if rate is None else None,
        "rate": rate,
        "prompt_tokens": arguments["prompt_tokens"].text,
        "max_tokens": arguments["max_tokens"].text,
        "shared_prefix_tokens": arguments["shared_prefix_tokens"],
        "seed": secrets.randbits(32) if arguments["seed"] is None else arguments["seed"],
    }


async def _measure(
    run: Run, arguments: Mapping[str, Any], load: dict[str, Any], transport: httpx.AsyncBaseTransport | None
) -> None:
    async with _client(arguments, transport) as client:
        as_text = arguments["text"] or arguments["endpoint"] == "chat"
        target = await find_target(
            client,
            tokenizer_of(client, arguments["tokenizer"]),
            endpoint=arguments["endpoint"],
            model=arguments["model"],
            as_text=as_text,
        )
        load |= {"model": target.model, "ignore_eos": target.ignore_eos}
        warmup = arguments["warmup"]
        jobs = _workload(target, arguments).jobs(warmup + arguments["requests"], load["seed"])
        how = partial(execute, client=client, target=target, seed=load["seed"])
        await how(Run(), jobs=jobs[:warmup], concurrency=arguments["concurrency"], rate=None)
        await how(run, jobs=jobs[warmup:], concurrency=arguments["concurrency"], rate=arguments["rate"])


def _client(arguments: Mapping[str, Any], transport: httpx.AsyncBaseTransport | None) -> AsyncClient:
    """A client that tries once: what a server refuses is part of the figures."""
    key = arguments["api_key"] or os.environ.get(KEY_VARIABLE)
    options: dict[str, Any] = {"timeout": arguments["timeout"], "retries": 0, "max_connections": None}
    try:
        return AsyncClient(arguments["url"], key, transport=transport, **options)
    except ValueError as error:
        raise BenchError(str(error)) from error


def _workload(target: Target, arguments: Mapping[str, Any]) -> Workload:
    return Workload(
        target.vocabulary,
        arguments["prompt_tokens"],
        arguments["max_tokens"],
        arguments["shared_prefix_tokens"],
        target.overhead,
        target.as_text,
    )


def _report(run: Run, arguments: Mapping[str, Any], load: Mapping[str, Any]) -> None:
    slo = arguments["slo"]
    summary = summarize(run.outcomes, seconds=run.seconds, slo=slo, unfinished=run.unfinished)
    print(table(summary, slo, load))
    file: Path | None = arguments["json"]
    if file is not None:
        told = as_json(summary, run.outcomes, slo, load, run.started)
        try:
            file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BenchError(f"--json {file}: {error}") from error
