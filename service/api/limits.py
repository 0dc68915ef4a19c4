"""The operator's limits of one request: beyond the ranges that a field has everywhere, what this server allows.

Knows settings and fields; does not know tokens before they have been counted.
"""

from typing import Any

from service.api.requests import ChatRequest, CompletionRequest, GenerateRequest, SamplingFields
from service.errors import LimitError
from service.settings import Settings


def check_fields(settings: Settings, fields: SamplingFields, *, max_tokens: int | None, choices: int) -> None:
    """Refuse what can be seen before any work is done.

    Args:
        settings: the limits.
        fields: the request's body.
        max_tokens: what it asks for, under whichever name.
        choices: its prompts times n.

    Raises:
        LimitError: a limit is exceeded.
    """
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    _check(settings, "max_stop_strings", len(stops), "stop", "stop strings")
    for stop in stops:
        _check(settings, "max_stop_length", len(stop), "stop", "characters in a stop string")
    _check(settings, "max_output_tokens", max_tokens or 0, "max_tokens", "tokens")
    if choices > 1:
        _check(settings, "max_choices", choices, "n", "choices")
        # More than that could not be queued even by a server that has nothing else to do.
        most = settings.max_running + settings.max_queued
        if choices > most:
            raise _error("max_choices", choices, most, "n", "choices", "max_running + max_queued")


def check_prompt(settings: Settings, tokens: int) -> None:
    """Refuse a prompt that is too long for this server, though the model could take it.

    Raises:
        LimitError: it has more tokens than `max_prompt_tokens`.
    """
    _check(settings, "max_prompt_tokens", tokens, "prompt", "tokens")


def in_schema(settings: Settings, schema: dict[str, Any]) -> None:
    """Write the limits into the API's description, in place."""
    for model in (GenerateRequest, CompletionRequest, ChatRequest):
        fields = schema["components"]["schemas"][model.__name__]["properties"]
        for name, limits in _LIMITED.items():
            for kind in fields.get(name, {}).get("anyOf", ()):
                _write(kind, {key: getattr(settings, setting) for key, setting in limits.items()})


_LIMITED = {
    "stop": {"maxItems": "max_stop_strings", "maxLength": "max_stop_length"},
    "n": {"maximum": "max_choices"},
    "max_tokens": {"maximum": "max_output_tokens"},
    "max_completion_tokens": {"maximum": "max_output_tokens"},
}
_OF_TYPE = {"maxItems": "array", "maxLength": "string", "maximum": "integer"}


def _write(kind: dict[str, Any], limits: dict[str, int | None]) -> None:
    for key, limit in limits.items():
        if limit is not None and kind.get("type") == _OF_TYPE[key] and "const" not in kind:
            kind[key] = limit
    if "items" in kind:
        _write(kind["items"], limits)


def _check(settings: Settings, setting: str, value: int, param: str, what: str) -> None:
    limit = getattr(settings, setting)
    if limit is not None and value > limit:
        raise _error(setting, value, limit, param, what, setting)


def _error(setting: str, value: int, limit: int, param: str, what: str, source: str) -> LimitError:
    return LimitError(
        f"{param}: {value} {what}; this server allows {limit} ({source})", param=param, code=f"{setting}_exceeded"
    )
