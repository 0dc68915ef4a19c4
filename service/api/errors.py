"""From errors to HTTP answers in OpenAI's shape. The one place where a status code is chosen."""

import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
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
from service.problems import SHOWN_VALUE_LENGTH, fields_at, is_mistyped, shown, wanted
from service.suggest import did_you_mean

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
    500: {"model": ErrorResponse, "description": "Generation failed, or the program has a fault"},
    503: {"model": ErrorResponse, "description": "The model is still loading, or the server is shutting down"},
}
"""What the API's description says of them."""


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
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        param, message = _describe(error.errors(), _body_of(request.scope["route"]))
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


def _body_of(route: APIRoute) -> type[BaseModel]:
    """What a route takes for its body."""
    assert route.body_field is not None
    body = route.body_field.field_info.annotation
    assert isinstance(body, type)
    assert issubclass(body, BaseModel)
    return body


def _describe(problems: Any, body: type[BaseModel]) -> tuple[str | None, str]:
    """The offending field and a sentence, from pydantic's list of problems. It is about the first field: the others
    come in the next try."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return None, f"the body is not valid JSON: {first['ctx']['error']}"
    if first["loc"] == ("body",):
        return None, "the body must be a JSON object, sent with Content-Type: application/json"
    problem, *as_good = _most_telling(problems)
    *parents, last = location = problem["loc"][1:]
    path, item = _place(problem)
    param = ".".join(map(str, path))
    if problem["type"] == "missing":
        return param, f"{param} is missing"
    if problem["type"] == "extra_forbidden":
        guess = did_you_mean(last, fields_at(body, parents), prefix=param.removesuffix(last))
        return param, f"{param} is not a field of this request{guess}"
    others = dict.fromkeys(f" or {wanted(other).removeprefix('must be ')}" for other in as_good)
    said = wanted(problem, fields_at(body, location)) + "".join(others)
    return param, f"{param}: {item}{said}, it is {shown(problem['input'])}"


def _most_telling(problems: Sequence[Any]) -> list[Any]:
    """Of the problems of the first field those that say most. There are several where the field may have one of several
    types: then what the value fits the furthest is what was meant, and only where it fits none are all of them told."""
    path, _ = _place(problems[0])
    of_field = [problem for problem in problems if _place(problem)[0][: len(path)] == path]

    def fits(problem: Any) -> tuple[int, bool, list[int]]:
        return len(problem["loc"]), not is_mistyped(problem), [step for step in problem["loc"] if isinstance(step, int)]

    best = max(of_field, key=fits)
    if not is_mistyped(best):
        return [best]
    return [best, *(other for other in of_field if other is not best and other["input"] is best["input"])]


def _place(problem: Any) -> tuple[tuple[str | int, ...], str]:
    """What leads to the field that a problem is about, and which item of the field it is, if one. Between them are
    pydantic's names for the alternatives of a type."""
    location = problem["loc"][1:]
    end = 1 + max((number for number, step in enumerate(location) if step in FIELD_NAMES), default=0)
    if problem["type"] == "extra_forbidden":
        end = len(location)
    path = [step for step in location[: end - 1] if isinstance(step, int) or step in FIELD_NAMES]
    numbers = list(takewhile(lambda step: isinstance(step, int), location[end:]))
    items = [step for step in location[end + len(numbers) :] if isinstance(step, int)]
    return (*path, location[end - 1], *numbers), f"item {items[0]} " if items else ""
