"""Routes for orchestrators: is it alive, is it ready, what do its metrics say."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from service.api.errors import ERRORS, error_response
from service.api.state import ServerDep
from service.errors import NotReadyError

router = APIRouter(tags=["operation"])


@router.get("/health", response_model=dict[str, str], responses={503: ERRORS[503]})
async def health(server: ServerDep) -> dict[str, str] | Response:
    """200 while the process can serve or is still loading; 503 once its engine has died: restart it."""
    if server.loaded is not None and not server.loaded.engine.is_alive:
        return error_response(NotReadyError("the engine has stopped"))
    return {"status": "alive"}


@router.get("/ready", response_model=dict[str, str], responses={503: ERRORS[503]})
async def ready(server: ServerDep) -> dict[str, str] | Response:
    """200 once the model is loaded and warm; 503 before, and once the engine has died: send no requests."""
    try:
        alive = server.require_loaded().engine.is_alive
    except NotReadyError as error:
        return error_response(error)  # asking for it is no request that was refused
    if not alive:
        return error_response(NotReadyError("the engine has stopped"))
    return {"status": "ready", "model": server.inspected.name}


@router.get("/metrics")
def metrics(server: ServerDep) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(generate_latest(server.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
