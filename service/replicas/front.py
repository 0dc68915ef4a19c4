"""The application in front of the replicas: reads how a request begins and hands it on. Knows HTTP and what replicas
are asked; does not know Ray.

It answers by itself only where no replica can: a body that is too large or does not come, and replicas that do not
answer. All else, refusals and descriptions included, is a replica's.
"""

import asyncio
import logging

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.datastructures import Headers, MutableHeaders

from service.api.auth import Keys
from service.api.body_limit import BodyLimit
from service.api.cors import allow_origins
from service.api.errors import install_error_handlers
from service.errors import RequestError
from service.logs import HEADER, RequestIds, request_id
from service.metrics import Metrics
from service.replicas.asgi import CarriedRequest, carried
from service.replicas.beginning import BeginningReader
from service.replicas.forwarding import Forwarded, ReplicaGoneError, Replicas
from service.replicas.placing import Beginning
from service.replicas.scrape import merge
from service.settings import Settings

logger = logging.getLogger(__name__)

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
NAME = "front"
"""Of the front itself, where replicas have names."""


def create_front(settings: Settings, reader: BeginningReader, replicas: Replicas) -> FastAPI:
    """Make the application.

    Args:
        settings: those of the replicas.
        reader: reads how requests begin.
        replicas: answer.

    Raises:
        StartupError: the file of keys cannot be read.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(CollectorRegistry())
    keys = Keys(settings)

    async def beginning_of(request: Request, body: bytes) -> Beginning | None:
        if keys and keys.find_bearer(request.headers.get("authorization", "").encode("latin-1")) is None:
            return None  # it will be refused: no work for it here either
        return await reader.read(request.url.path, body)

    @app.get("/metrics")
    async def scrape(request: Request) -> Response:
        """What all replicas say, and what the front itself has refused."""
        return await _scrape(replicas, _carried(request, b""), metrics)

    @app.api_route("/{path:path}", methods=METHODS)
    async def forward(request: Request) -> Response:
        body = await request.body()
        return Forwarded(replicas, _carried(request, body), await beginning_of(request, body))

    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, max_silence=settings.client_timeout_seconds)
    allow_origins(app, settings)
    app.add_middleware(RequestIds)
    install_error_handlers(app, metrics)
    return app


def _carried(request: Request, body: bytes) -> CarriedRequest:
    """A request with the id that it has here, so that it has the same everywhere."""
    headers = MutableHeaders(raw=list(request.scope["headers"]))
    headers[HEADER] = request_id.get() or ""
    return carried({**request.scope, "headers": headers.raw}, body)


async def _scrape(replicas: Replicas, request: CarriedRequest, metrics: Metrics) -> Response:
    """One answer of all replicas' answers: one that is not well is left out, a refusal is passed on."""
    texts: dict[str, str] = {}
    for name in replicas.names:  # one after the other: Ray tells apart the calls of one request only so
        try:
            status, headers, body = await _whole(replicas, request, name)
        except (ReplicaGoneError, RequestError) as error:
            logger.warning("no metrics of replica %s: %s", name, error)
            continue
        if status != 200:
            return Response(body, status, dict(headers))
        texts[name] = body.decode()
    refusals = CollectorRegistry(auto_describe=False)
    refusals.register(metrics.refused)
    texts[NAME] = generate_latest(refusals).decode()
    merged = await asyncio.to_thread(merge, texts)
    return Response(merged, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _whole(replicas: Replicas, request: CarriedRequest, name: str) -> tuple[int, Headers, bytes]:
    status, headers, body = 500, Headers(), b""
    async for batch in replicas.ask(request, only=name):
        for message in batch:
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
            else:
                body += message.get("body", b"")
    return status, headers, body
