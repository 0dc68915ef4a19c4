"""The deployments of Ray Serve: how many replicas there are, what each of them gets, and what comes before them.

`serve run service.replicas.application:app ray=4 model=…` and a RayService's `import_path` find `app` here;
`ropewalk serve --ray N` calls `application`.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from prometheus_client import disable_created_metrics
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import build, logs
from service.cli import load_settings
from service.process import ENVIRONMENT
from service.replicas.beginning import beginning_reader
from service.replicas.calling import RayReplicas
from service.replicas.front import create_front
from service.replicas.replica import Replica
from service.settings import Settings

SECONDS_BETWEEN_STATS = 1.0
SECONDS_TO_LOOK_BACK = 30.0
SECONDS_BEFORE_MORE = 30.0
SECONDS_BEFORE_FEWER = 600.0
"""Whoever goes takes its cached beginnings along."""
NO_LIMIT = 100_000
"""Requests that Ray lets through: replicas count and refuse by themselves, in the API's own words."""


class Engine(Replica):
    """A replica as Ray Serve makes and ends it."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Ray awaits it
        super().__init__(settings)
        await self.wait_until_loaded()

    async def __del__(self) -> None:
        await self.stop()


class WithoutRequestId:
    """ASGI middleware that leaves the answer's request id to Ray's proxy, which puts it on every answer; clients would
    read two as one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[logs.HEADER]
            await send(message)

        await self._app(scope, receive, send_without_id)


@serve.ingress()
class Front:
    """What Ray's HTTP proxy calls."""

    def __init__(self, settings: Settings, engines: DeploymentHandle) -> None:
        logs.configure(settings.log_level, settings.log_format)
        disable_created_metrics()
        self._app = WithoutRequestId(create_front(settings, beginning_reader(settings), RayReplicas(engines)))

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Ray's name
        return self._app


def application(settings: Settings) -> serve.Application:
    """The application of a model.

    Args:
        settings: with `ray`, the number of replicas. What they name has to be on every node.
    """
    assert settings.ray is not None
    capacity = settings.max_running + settings.max_queued
    logging = LoggingConfig(enable_access_log=settings.log_level == "debug")
    on_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    engines = serve.deployment(Engine).options(
        name="engine",
        ray_actor_options={
            "num_cpus": settings.ray_cpus,
            "num_gpus": int(on_gpu),
            "runtime_env": {"env_vars": _environment(settings.ray_cpus)},
        },
        max_ongoing_requests=NO_LIMIT,
        max_queued_requests=settings.ray * capacity,  # on the way to a replica, which takes milliseconds
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.shutdown_seconds,
        health_check_period_s=2,
        health_check_timeout_s=30,
        max_constructor_retry_count=2,
        request_router_config=RequestRouterConfig(
            request_router_class="service.replicas.router:PlanRouter",
            request_router_kwargs={"capacity": capacity},
            request_routing_stats_period_s=SECONDS_BETWEEN_STATS,
        ),
        logging_config=logging,
        **_number(settings.ray, settings.ray_min),
    )
    front = serve.deployment(Front).options(
        name="front",
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _environment(1)}},
        max_ongoing_requests=NO_LIMIT,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.shutdown_seconds,
        logging_config=logging,
    )
    return front.bind(settings, engines.bind(settings))


def _number(most: int, least: int | None) -> dict[str, Any]:
    """As many as there are to be, or between two numbers."""
    if least is None or least == most:
        return {"num_replicas": most}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            look_back_period_s=SECONDS_TO_LOOK_BACK,
            upscale_delay_s=SECONDS_BEFORE_MORE,
            downscale_delay_s=SECONDS_BEFORE_FEWER,
            policy=AutoscalingPolicy(policy_function="service.replicas.scaling:replicas_wanted"),
        )
    }


def _environment(cores: int) -> dict[str, str]:
    """Of a process that computes on so many cores: it has to be there before torch is."""
    own = {**ENVIRONMENT, "OMP_NUM_THREADS": str(cores)}
    path = os.environ.get("PYTHONPATH")
    return own if path is None else {**own, "PYTHONPATH": path}


def app(arguments: Mapping[str, str]) -> serve.Application:
    """The application of the settings in `arguments`, in the environment, and in the file that `config` names.

    Args:
        arguments: settings by name, as text.

    Raises:
        StartupError: a setting is wrong, or `ray` is missing.
    """
    settings = load_settings({"ray": "1", **arguments})
    build.read_policy(settings)  # what is wrong with them is told here, not by every replica
    return application(settings)
