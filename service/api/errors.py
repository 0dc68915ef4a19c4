"""From errors to HTTP answers in OpenAI's shape. The one place where a status code is chosen."""

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service.api.requests import FIELD_NAMES
from service.api.responses import ErrorBody, ErrorResponse
from service.errors import (
    CancelledError,
    DeadlineError,
    GenerationError,
    KeyBusyError,
    KeyRequiredError,
    NotReadyError,
    QueueFullError,
    RequestError,
    UnknownModelError,
)
from service.logs import HEADER, request_id
from service.metrics import Metrics

logger = logging.getLogger(__name__)

STATUS: dict[type[RequestError], int] = {
    KeyRequiredError: 401,
    UnknownModelError: 404,
    DeadlineError: 408,
    QueueFullError: 429,
    KeyBusyError: 429,
    CancelledError: 503,
    NotReadyError: 503,
    GenerationError: 500,
}
"""Status of each error that has one of its own; every other RequestError is a 400."""

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request cannot be served as it stands"},
    401: {"model": ErrorResponse, "description": "A key is needed and was not given"},
    404: {"model": ErrorResponse, "description": "Another model was asked for"},
    408: {"model": ErrorResponse, "description": "The request took longer than it may, or its body did not come"},
    413: {"model": ErrorResponse, "description": "The body is too large"},
    429: {"model": ErrorResponse, "description": "Too many requests are waiting or under way; see Retry-After"},
    500: {"model": ErrorResponse, "description": "Generation failed"},
    503: {"model": ErrorResponse, "description": "The model is still loading, or the server is shutting down"},
}
"""What the API's description says of them."""

SHOWN_VALUE_LENGTH = 100
ABOUT_NAMES = {"extra_forbidden": "is not a field of this request", "missing": "is missing"}


def error_body(error: RequestError) -> ErrorResponse:
    """The JSON of an error."""
    return _body(_status(error), error.message, error.param, error.code)


def error_response(error: RequestError) -> JSONResponse:
    """The answer to an error."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return _response(_status(error), error_body(error), headers)


def refuse(error: RequestError, metrics: Metrics) -> JSONResponse:
    """The answer to an error, counted and logged as a refusal unless the request had been admitted."""
    if not isinstance(error, GenerationError | CancelledError | DeadlineError):
        _note_refusal(error_body(error), metrics)
    return error_response(error)


def install_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    """Answer every error of a route in OpenAI's shape, and count refusals."""

    def respond(status: int, body: ErrorResponse, headers: Mapping[str, str] | None = None) -> JSONResponse:
        _note_refusal(body, metrics)
        return _response(status, body, headers)

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> JSONResponse:
        return refuse(error, metrics)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        param, message = _describe(error.errors())
        return respond(400, _body(400, message, param, "invalid_value"))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        codes = {400: "invalid_value", 404: "not_found", 405: "method_not_allowed"}
        codes |= {408: "body_timeout", 413: "body_too_large"}
        code = codes.get(error.status_code)
        return respond(error.status_code, _body(error.status_code, str(error.detail), None, code), error.headers)

    @app.exception_handler(Exception)
    async def unexpected_error(_: Request, error: Exception) -> JSONResponse:
        body = _body(500, f"internal error ({type(error).__name__})", None, "internal_error")
        return respond(500, body, {HEADER: request_id.get() or ""})  # answered outside of every middleware


def _note_refusal(body: ErrorResponse, metrics: Metrics) -> None:
    """Count a refusal and log it, without its message, which may quote the prompt."""
    code, param = body.error.code or "other", body.error.param
    metrics.refused.labels(code).inc()
    logger.info("refused: %s%s", code, "" if param is None else f", {param[:SHOWN_VALUE_LENGTH]!r}")


def _response(status: int, body: ErrorResponse, headers: Mapping[str, str] | None = None) -> JSONResponse:
    own = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}, 401: {"WWW-Authenticate": "Bearer"}}
    return JSONResponse(body.model_dump(), status, {**own.get(status, {}), **(headers or {})})


def _status(error: RequestError) -> int:
    return STATUS.get(type(error), 400)


def _body(status: int, message: str, param: str | None, code: str | None) -> ErrorResponse:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    return ErrorResponse(error=ErrorBody(message=message, type=kind, param=param, code=code))


def _describe(problems: Any) -> tuple[str | None, str]:
    """The offending field and a sentence, from pydantic's list of problems. All of them are about the first field: the
    others come in the next try."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return None, f"the body is not valid JSON: {first['ctx']['error']}"
    if first["loc"] == ("body",):
        return None, "the body must be a JSON object, sent with Content-Type: application/json"
    if first["type"] in ABOUT_NAMES:
        param = ".".join(map(str, first["loc"][1:]))
        return param, f"{param} {ABOUT_NAMES[first['type']]}"
    param = _param(first["loc"])
    alternatives = dict.fromkeys(problem["msg"] for problem in problems if _param(problem["loc"]) == param)
    value = repr(first["input"])
    shown = value if len(value) <= SHOWN_VALUE_LENGTH else value[:SHOWN_VALUE_LENGTH] + "..."
    return param, f"{param}: {' or '.join(alternatives)}, it is {shown}"


def _param(location: tuple[str | int, ...]) -> str:
    """The field's dotted name. What follows it in the location names alternatives of its type."""
    return ".".join(
        map(str, itertools.takewhile(lambda part: isinstance(part, int) or part in FIELD_NAMES, location[1:]))
    )
