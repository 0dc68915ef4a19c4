"""Routes for orchestrators: is it alive, is it ready, what do its metrics say."""

from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from service.api.errors import ERRORS, error_response
from service.api.state import ServerDep
from service.errors import NotReadyError

router = APIRouter(tags=["operation"], responses={500: ERRORS[500]})

TEXT: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}


@router.head("/health", response_model=None, include_in_schema=False)
@router.get("/health", response_model=dict[str, str], responses={503: ERRORS[503]})
async def health(server: ServerDep) -> dict[str, str] | Response:
    """200 while the process loads, serves or shuts down; 503 once its engine has died, fails or hangs: restart it."""
    try:
        server.check_health()
    except NotReadyError as error:
        return error_response(error)
    return {"status": "alive"}


@router.head("/ready", response_model=None, include_in_schema=False)
@router.get("/ready", response_model=dict[str, str], responses={503: ERRORS[503]})
async def ready(server: ServerDep) -> dict[str, str] | Response:
    """200 while requests are served; 503 before the model is warm, while the server shuts down, and where /health is
    503: send no requests."""
    try:
        server.require_loaded()
        server.check_health()
    except NotReadyError as error:
        return error_response(error)  # asking for it is no request that was refused
    return {"status": "ready", "model": server.inspected.name}


@router.head("/metrics", response_model=None, include_in_schema=False)
@router.get("/metrics", response_class=Response, responses={200: TEXT})
def metrics(server: ServerDep) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(generate_latest(server.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
