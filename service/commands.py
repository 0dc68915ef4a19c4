"""What the commands of `ropewalk` do."""

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, disable_created_metrics

from model_patches.errors import ModelError
from model_patches.loading.cache import default_cache_dir
from model_patches.loading.embedded import fetch_default as fetch_default_model
from service import build
from service.app import create_app
from service.cli import load_settings
from service.errors import RequestError, StartupError
from service.metrics import Metrics
from service.scaling.explain import explain
from service.scaling.policy import RopeWish

SECONDS_FOR_LAST_WORDS = 5  # for telling clients that their requests were cancelled


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which on SIGTERM takes no more connections and waits for requests to finish. Those that have
    not finished in time are cancelled and told so, before uvicorn closes their connections."""

    def __init__(self, config: uvicorn.Config, drain_seconds: float) -> None:
        super().__init__(config)
        self._drain_seconds = drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cancelling = asyncio.get_running_loop().call_later(self._drain_seconds, self._cancel_requests)
        await super().shutdown(sockets)
        cancelling.cancel()

    def _cancel_requests(self) -> None:
        assert isinstance(self.config.app, FastAPI)
        if (loaded := self.config.app.state.server.loaded) is not None:
            asyncio.get_running_loop().run_in_executor(None, loaded.engine.stop)


def serve(arguments: Mapping[str, Any]) -> None:
    """Serve a model over HTTP until SIGTERM or SIGINT.

    Raises:
        StartupError: the server cannot start.
    """
    settings = load_settings(arguments)
    # uvicorn drains on the first signal and raises it again once all is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    inspected = build.inspect(settings)
    disable_created_metrics()
    metrics = Metrics(CollectorRegistry())
    failures: list[Exception] = []

    def stop(error: Exception) -> None:
        failures.append(error)
        uvicorn_server.should_exit = True

    app = create_app(settings, inspected, metrics, lambda: build.load(settings, inspected, metrics), stop)
    uvicorn_server = DrainingServer(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            log_level=settings.log_level,
            access_log=settings.log_level == "debug",
            timeout_graceful_shutdown=settings.shutdown_seconds + SECONDS_FOR_LAST_WORDS,
        ),
        drain_seconds=settings.shutdown_seconds,
    )
    uvicorn_server.run()
    if failures:
        raise failures[0]


def fetch_default(_: Mapping[str, Any]) -> None:
    """Download and convert the embedded default model, unless that has been done.

    Raises:
        StartupError: it cannot be had.
    """
    try:
        folder = fetch_default_model(default_cache_dir())
    except ModelError as error:
        raise StartupError(str(error)) from error
    print(f"the default model is in {folder}")


def plan(arguments: Mapping[str, Any]) -> None:
    """Print the plan that a request would get. Reads config.json only.

    Raises:
        StartupError: the model or a setting is wrong.
        RequestError: the request would be refused.
    """
    for name in ("prompt_tokens", "max_tokens"):
        if arguments[name] is not None and arguments[name] < 1:
            raise RequestError(f"{name} must be at least 1, it is {arguments[name]}", param=name)
    policy = build.inspect(load_settings(arguments)).policy
    wish = RopeWish(scheme=arguments["scheme"], factor=arguments["factor"])
    choice = policy.choose(arguments["prompt_tokens"], arguments["max_tokens"], wish)
    facts = explain(choice, policy)
    if arguments["json"]:
        print(json.dumps(facts))
        return
    for name in ("scheme", "mode", "factor", "attention_factor", "native_length", "max_length", "max_tokens", "reason"):
        print(f"{name:17} {facts[name]}")
    print(f"{'ladder':17} {', '.join(f'{factor:g}' for factor in policy.ladder)}")
    print("\npair  wavelength  rotations  under plan  kind")
    for number, pair in enumerate(facts["pairs"]):
        print(
            f"{number:4}  {pair['wavelength']:10.1f}  {pair['rotations']:9.2f}  "
            f"{pair['plan_wavelength']:10.1f}  {pair['kind']}"
        )
