"""What the API's own description says beyond the routes: streams, keys, headers, this server's limits.

FastAPI writes the description from the routes; what is not so here is taken out. Knows OpenAPI's document; does not
know how a request is served.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api.errors import ERRORS
from service.api.responses import ChatChunk, CompletionResponse, ErrorResponse, GenerateChunk, GenerateResponse
from service.logs import HEADER
from service.scaling.fixed import AnyPolicy
from service.settings import Settings

REFERENCE = "#/components/schemas/{model}"
NOT_SENT = {"422": ("HTTPValidationError", "ValidationError")}
"""What FastAPI adds to every route with a body, and the schemas that nothing else needs: here it is a 400."""
STREAMS: dict[str, tuple[tuple[type[BaseModel], ...], bool]] = {
    "/generate": ((GenerateChunk, GenerateResponse, ErrorResponse), False),
    "/v1/completions": ((CompletionResponse, ErrorResponse), True),
    "/v1/chat/completions": ((ChatChunk, ErrorResponse), True),
}
"""The routes that stream: what the data of an event can be, and whether `[DONE]` is the last."""
LIMITS = (
    *("max_body_bytes", "max_prompt_tokens", "max_output_tokens", "max_choices", "max_stop_strings", "max_stop_length"),
    *("max_queued", "max_queued_tokens", "max_requests_per_key", "request_timeout_seconds", "client_timeout_seconds"),
)
"""The settings that limit a request; some are also in the schemas of fields."""
RETRIED = ("429", "503")


def complete(settings: Settings, policy: AnyPolicy, open_paths: Collection[str] | None, schema: dict[str, Any]) -> None:
    """Mend and complete the description of one server, in place.

    Args:
        settings: of the server.
        policy: says how long requests can be, and which schemes they can ask for.
        open_paths: paths that ask for no key; None where none does.
        schema: an OpenAPI document.
    """
    schema["info"]["description"] = _description(settings, policy.max_length)
    _document_schemes(policy.schemes, schema)
    _document_streams(schema)
    for path, operation in _operations(schema):
        needs_key = open_paths is not None and path not in open_paths
        _document_key(operation, needs_key=needs_key)
        _document_headers(operation["responses"])
        for status in NOT_SENT:
            operation["responses"].pop(status, None)
    for names in NOT_SENT.values():
        for name in names:
            schema["components"]["schemas"].pop(name, None)
    if open_paths is not None:
        bearer = {"type": "http", "scheme": "bearer", "description": "one of the server's keys"}
        schema["components"]["securitySchemes"] = {"bearer": bearer}


def _operations(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            yield path, operation


def _description(settings: Settings, max_length: int) -> str:
    """This server's limits, as Markdown."""
    lines = [f"- max_model_len: {max_length}, tokens of a prompt and its generation together"]
    for name in LIMITS:
        value, text = getattr(settings, name), type(settings).model_fields[name].description or ""
        lines.append(f"- {name}: {'no limit' if value is None else value}, {text.partition(';')[0]}")
    return "\n".join(["Limits of this server, by the settings that they come from:", "", *lines])


def _document_schemes(schemes: Iterable[str], schema: dict[str, Any]) -> None:
    for kind in schema["components"]["schemas"]["RopeWishFields"]["properties"]["scheme"]["anyOf"]:
        if kind["type"] == "string":
            kind["enum"] = sorted(schemes)


def _document_streams(schema: dict[str, Any]) -> None:
    models = {model for events, _ in STREAMS.values() for model in events}
    modes = [(model, "serialization") for model in sorted(models, key=lambda model: model.__name__)]
    _, definitions = models_json_schema(modes, ref_template=REFERENCE)  # type: ignore[arg-type]
    for name, definition in definitions["$defs"].items():
        schema["components"]["schemas"].setdefault(name, definition)
    for path, (events, is_closed) in STREAMS.items():
        answer = schema["paths"][path]["post"]["responses"]["200"]
        answer["description"] = "The answer; with stream: true as server-sent events"
        answer["content"]["text/event-stream"] = {"itemSchema": _event(events, is_closed=is_closed)}


def _event(events: tuple[type[BaseModel], ...], *, is_closed: bool) -> dict[str, Any]:
    """One server-sent event, whose data is JSON; a field of its own for the JSON's schema, as the data is a string."""
    shapes = [{"$ref": REFERENCE.format(model=model.__name__)} for model in events]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": shapes},
    }
    if is_closed:
        data = {"anyOf": [data, {"const": "[DONE]", "description": "the last event"}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _document_key(operation: dict[str, Any], *, needs_key: bool) -> None:
    responses = operation["responses"]
    if not needs_key:
        responses.pop("401", None)
        return
    operation["security"] = [{"bearer": []}]
    shape = {"schema": {"$ref": REFERENCE.format(model=ErrorResponse.__name__)}}
    responses["401"] = {"description": ERRORS[401]["description"], "content": {"application/json": shape}}


def _document_headers(responses: dict[str, Any]) -> None:
    for status, response in responses.items():
        headers = {HEADER: _header("string", "the request's own id, or a new one")}
        if status in RETRIED:
            headers["Retry-After"] = _header("integer", "seconds after which another try may succeed")
        response["headers"] = headers


def _header(kind: str, description: str) -> dict[str, Any]:
    return {"description": description, "required": True, "schema": {"type": kind}}
