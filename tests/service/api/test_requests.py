"""The limits of every field, and that a field is accepted, or refused by its name, but never ignored."""

from typing import Any, get_args

import httpx
import pytest

from service.api.requests import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_COUNT,
    MAX_STOP_TOKENS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    PlanRequest,
    RequestModel,
    RopeWishFields,
    TokenizeRequest,
    ToleratedFields,
)
from service.engine.grammar import MAX_TEXT
from tests.serving import MODEL, error_of

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions")
MINIMAL: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "a", "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/rope/plan": {"prompt_tokens": 5},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
}
BODIES: dict[str, type[RequestModel]] = {
    "/generate": GenerateRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/rope/plan": PlanRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}

IN_RANGE: dict[str, tuple[Any, ...]] = {
    "model": (MODEL, None),
    "max_tokens": (1, None),
    "min_tokens": (0, 1, None),
    "temperature": (0, 0.0, 0.7, 2, 2.0, None),
    "top_p": (0.001, 1, 1.0, None),
    "top_k": (0, 1, MAX_COUNT, None),
    "min_p": (0, 0.5, 1, None),
    "seed": (-(2**63), 0, 2**63 - 1, None),
    "stop": ("x" * MAX_STOP_LENGTH, ["x"], ["x"] * MAX_STOPS, [], None),
    "stop_token_ids": ([], [127], [5] * MAX_STOP_TOKENS, None),
    "ignore_eos": (True, False, None),
    "presence_penalty": (-2, 0, 2.0, None),
    "frequency_penalty": (-2.0, 0, 2, None),
    "repetition_penalty": (0.01, 1, 100, None),
    "logit_bias": ({}, {"0": -100, "127": 100.0}, None),
    "response_format": ({"type": "text"}, {"type": "json_object"}, None),
    "structured_outputs": ({"choice": ["a"]}, {"json": {}}, {"regex": "a", "choice": None}, None),
    "n": (1, None),
    "stream": (False, None),
    "timeout": (1000, 0.5e9, None),
    "rope": (
        {},
        {"scheme": "yarn", "mode": "static", "factor": 1.5, "growth": "stop", "prefix_reuse": "same-plan"},
        {"growth": "rerotate", "prefix_reuse": "rerotate"},
        {"growth": "reprefill"},
        None,
    ),
    "user": ("somebody", None),
}
OUT_OF_RANGE: list[tuple[str, Any, tuple[str, ...]]] = [
    ("model", 3, ("string", "3")),
    ("max_tokens", 0, ("greater than or equal to 1", "0")),
    ("max_tokens", -1, ("greater than or equal to 1", "-1")),
    ("max_tokens", 1.5, ("integer", "1.5")),
    ("max_tokens", "8", ("integer", "'8'")),
    ("max_tokens", True, ("integer", "True")),
    ("max_tokens", MAX_COUNT + 1, (str(MAX_COUNT), str(MAX_COUNT + 1))),
    ("min_tokens", -1, ("greater than or equal to 0", "-1")),
    ("min_tokens", MAX_COUNT + 1, (str(MAX_COUNT),)),
    ("temperature", -0.1, ("greater than or equal to 0", "-0.1")),
    ("temperature", 2.01, ("less than or equal to 2", "2.01")),
    ("temperature", "hot", ("number", "'hot'")),
    ("top_p", 0, ("greater than 0", "0")),
    ("top_p", 1.01, ("less than or equal to 1", "1.01")),
    ("top_k", -1, ("greater than or equal to 0", "-1")),
    ("top_k", MAX_COUNT + 1, (str(MAX_COUNT),)),
    ("min_p", -0.5, ("greater than or equal to 0", "-0.5")),
    ("min_p", 1.5, ("less than or equal to 1", "1.5")),
    ("seed", 2**63, (f"less than {2**63}", str(2**63))),
    ("seed", -(2**63) - 1, (str(-(2**63)),)),
    ("seed", 1.5, ("integer", "1.5")),
    ("stop", "", ("at least 1 character",)),
    ("stop", "x" * (MAX_STOP_LENGTH + 1), (f"allows {MAX_STOP_LENGTH} (max_stop_length)",)),
    ("stop", ["x"] * (MAX_STOPS + 1), (f"{MAX_STOPS + 1} stop strings", f"allows {MAX_STOPS} (max_stop_strings)")),
    ("stop", 7, ("string", "list", "7")),
    ("stop_token_ids", [128], ("token id 128 is out of range", "128")),
    ("stop_token_ids", [1] * (MAX_STOP_TOKENS + 1), (f"at most {MAX_STOP_TOKENS} items",)),
    ("ignore_eos", "yes", ("boolean", "'yes'")),
    ("presence_penalty", 2.5, ("less than or equal to 2", "2.5")),
    ("presence_penalty", -2.5, ("greater than or equal to -2", "-2.5")),
    ("frequency_penalty", 2.5, ("less than or equal to 2", "2.5")),
    ("frequency_penalty", "1", ("number", "'1'")),
    ("repetition_penalty", 0, ("greater than or equal to 0.01", "0")),
    ("repetition_penalty", 101, ("less than or equal to 100", "101")),
    ("logit_bias", {"5": 101}, ("less than or equal to 100", "101")),
    ("logit_bias", {"5": -101}, ("greater than or equal to -100", "-101")),
    ("logit_bias", {"5": "1"}, ("number", "'1'")),
    ("logit_bias", {"a": 1}, ("integer", "'a'")),
    ("logit_bias", {"-1": 1}, ("greater than or equal to 0", "-1")),
    ("logit_bias", {"128": 1}, ("token id 128 is out of range", "128")),
    ("logit_bias", {str(token): 1 for token in range(MAX_BIASES + 1)}, (f"at most {MAX_BIASES} items",)),
    ("response_format", "json_object", ("an object with type", "'json_object'")),
    ("response_format.type", "yaml", ("text", "json_object", "json_schema", "'yaml'")),
    ("structured_outputs", {}, ("give one of json, regex, choice, grammar, not none",)),
    ("structured_outputs", {"json": {}, "regex": "a"}, ("give one of", "json and regex")),
    ("structured_outputs.json", 5, ("must be an object", "5")),
    ("structured_outputs.json", {"x-guidance": {}}, ("x-guidance",)),
    ("structured_outputs.json", {"type": "text"}, ("text",)),
    ("structured_outputs.regex", "(", ("regex",)),
    ("structured_outputs.regex", "a" * (MAX_TEXT + 1), (str(MAX_TEXT), str(MAX_TEXT + 1))),
    ("structured_outputs.choice", [], ("at least 1 item",)),
    ("structured_outputs.choice", ["a"] * (MAX_CHOICES + 1), (f"at most {MAX_CHOICES} items",)),
    ("structured_outputs.grammar", "start: missing", ("missing",)),
    ("n", 0, ("1", "0")),
    ("stream", "yes", ("boolean", "'yes'")),
    ("timeout", 0, ("greater than 0", "0")),
    ("timeout", "5", ("number", "'5'")),
    ("rope", "yarn", ("an object with scheme", "'yarn'")),
    ("rope.scheme", 5, ("string", "5")),
    ("rope.mode", "fast", ("native", "static", "dynamic", "'fast'")),
    ("rope.factor", 0.5, ("greater than or equal to 1", "0.5")),
    ("rope.factor", "2", ("number", "'2'")),
    ("rope.growth", "sideways", ("rerotate", "reprefill", "stop", "'sideways'")),
    ("rope.prefix_reuse", "always", ("same-plan", "rerotate", "'always'")),
    ("user", 5, ("string", "5")),
]
"""Field, value, and what the message must contain beside the field's name."""


ELSEWHERE = {"prompt", "messages", "stream_options", "max_completion_tokens", "logprobs", "top_logprobs"}
ELSEWHERE |= {"prompt_logprobs", "echo", "best_of", "suffix", "tools", "tool_choice", "parallel_tool_calls"}
ELSEWHERE |= {"modalities", "chat_template_kwargs", "reasoning_effort"}
"""Fields of some routes only, which other tests are about."""


def with_field(path: str, field: str, value: Any) -> dict[str, Any]:
    body = dict(MINIMAL[path])
    outer, _, inner = field.partition(".")
    body[outer] = {inner: value} if inner else value
    return body


def test_every_field_of_the_generating_routes_is_in_these_tables() -> None:
    assert set.intersection(*(set(BODIES[path].model_fields) for path in GENERATING)) >= IN_RANGE.keys()
    others = {name for path in GENERATING for name in BODIES[path].model_fields} - IN_RANGE.keys()
    assert others == ELSEWHERE | set(ToleratedFields.model_fields)
    refused = {name for field, _, _ in OUT_OF_RANGE for name in (field, field.partition(".")[0])}
    assert refused >= IN_RANGE.keys()
    assert {f"rope.{name}" for name in RopeWishFields.model_fields} <= refused


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in IN_RANGE.items() for value in values])
def test_every_field_takes_its_limits(client: httpx.Client, path: str, field: str, value: Any) -> None:
    response = client.post(path, json=with_field(path, field, value))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(("field", "value", "said"), OUT_OF_RANGE)
def test_a_value_beyond_a_limit_is_refused_with_field_value_and_limit(
    client: httpx.Client, path: str, field: str, value: Any, said: tuple[str, ...]
) -> None:
    response = client.post(path, json=with_field(path, field, value))
    error = error_of(response)
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    assert all(part in error["message"] for part in said), error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/generate", {}, "prompt", "prompt is missing"),
        ("/generate", {"prompt": ""}, "prompt", "at least 1 character"),
        ("/generate", {"prompt": []}, "prompt", "at least 1 item"),
        ("/generate", {"prompt": [1, -1]}, "prompt", "greater than or equal to 0"),
        ("/generate", {"prompt": None}, "prompt", "it is None"),
        ("/generate", {"prompt": ["a", "b"]}, "prompt", "must be an integer"),
        ("/generate", {"prompt": "a", "n": 2}, "n", "1"),
        ("/v1/completions", {"prompt": "a", "n": 129}, "n", "129 choices; this server allows 128 (max_choices)"),
        ("/v1/completions", {"prompt": ["a"] * 65, "n": 2}, "n", "130 choices; this server allows 128 (max_choices)"),
        ("/v1/completions", {"prompt": ["a", [5]], "best_of": 2}, "best_of", "it must be n, 1; it is 2"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix", "'b'"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt", "at least 1 character"),
        ("/v1/completions", {"prompt": ["a", []]}, "prompt", "at least 1 item"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": 1}}, None, "boolean"),
        ("/v1/chat/completions", {}, "messages", "messages is missing"),
        ("/v1/chat/completions", {"messages": []}, "messages", "at least 1 item"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content", "content is missing"),
        ("/v1/chat/completions", {"messages": [{"role": "pirate", "content": "a"}]}, "messages.0.role", "'pirate'"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string"),
        ("/v1/chat/completions", MINIMAL["/v1/chat/completions"] | {"logprobs": 3}, "logprobs", "boolean"),
        ("/v1/chat/completions", MINIMAL["/v1/chat/completions"] | {"top_logprobs": 21}, "top_logprobs", "20"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ("/generate", {"prompt": "a", "logprobs": True}, "logprobs", "integer"),
        ("/generate", {"prompt": "a", "logprobs": -1}, "logprobs", "greater than or equal to 0"),
        ("/v1/rope/plan", {"prompt_tokens": 0}, "prompt_tokens", "greater than or equal to 1"),
        ("/v1/rope/plan", {"prompt_tokens": 5, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0", "greater than or equal to 0"),
        ("/tokenize", {"prompt": 5}, "prompt", "string"),
    ],
)
def test_a_bad_body_is_refused_with_the_offending_field(
    client: httpx.Client, path: str, body: dict[str, Any], param: str | None, said: str
) -> None:
    response = client.post(path, json=body)
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == (param or "stream_options.include_usage")
    assert said in error["message"], error["message"]


@pytest.mark.parametrize("path", MINIMAL)
def test_an_unknown_field_is_refused_by_name(client: httpx.Client, path: str) -> None:
    assert client.post(path, json=MINIMAL[path]).status_code == 200
    response = client.post(path, json=MINIMAL[path] | {"functions": []})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "functions")
    assert error["message"].startswith("functions is not a field of this request")


@pytest.mark.parametrize("path", [*GENERATING, "/v1/rope/plan"])
def test_an_unknown_field_of_a_wish_is_refused_by_name(client: httpx.Client, path: str) -> None:
    error = error_of(client.post(path, json=MINIMAL[path] | {"rope": {"theta": 1e4}}))
    assert error["param"] == "rope.theta"
    assert error["message"] == "rope.theta is not a field of this request"


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("/v1/completions", {"stream": True, "stream_options": {"every": 1}}, "stream_options.every"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a", "weight": 1}]},
            "messages.0.weight",
        ),
    ],
)
def test_an_unknown_field_of_another_part_is_refused_by_name(
    client: httpx.Client, path: str, extra: dict[str, Any], param: str
) -> None:
    error = error_of(client.post(path, json=MINIMAL[path] | extra))
    assert error["param"] == param
    assert error["message"] == f"{param} is not a field of this request"


def test_a_long_value_is_shown_only_in_part(client: httpx.Client) -> None:
    error = error_of(client.post("/generate", json={"prompt": "a", "stop": "x" * 50_000}))
    assert len(error["message"]) < 500


def test_only_listed_growths_are_accepted(client: httpx.Client) -> None:
    """Whatever growths the field's type names, each of them is granted."""
    annotation = RopeWishFields.model_fields["growth"].annotation
    growths = [value for part in get_args(annotation) for value in get_args(part)]
    assert "stop" in growths
    for growth in growths:
        answer = client.post("/generate", json=MINIMAL["/generate"] | {"rope": {"growth": growth}}).json()
        assert answer["rope"]["growth"] == growth
