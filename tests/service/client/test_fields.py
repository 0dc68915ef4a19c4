"""What can be said through the client is what the API takes."""

from typing import Any, get_type_hints

import pytest

from service.api import requests
from service.client import fields, message_fields

ROUTES = [
    (fields.GenerateFields, requests.GenerateRequest, {"stream"}),
    (fields.CompletionFields, requests.CompletionRequest, {"stream", "stream_options"}),
    (fields.StreamedCompletionFields, requests.CompletionRequest, {"stream"}),
    (fields.ChatFields, requests.ChatRequest, {"stream", "stream_options"}),
    (fields.StreamedChatFields, requests.ChatRequest, {"stream"}),
    (fields.PlanFields, requests.PlanRequest, set()),
    (fields.RopeFields, requests.RopeWishFields, set()),
    (fields.TokenizeFields, requests.TokenizeRequest, set()),
    (message_fields.MessageFields, requests.ChatMessage, set()),
    (message_fields.TextPartFields, requests.TextPart, set()),
    (message_fields.ToolCallFields, requests.ToolCall, set()),
    (message_fields.CalledFunctionFields, requests.CalledFunction, set()),
    (message_fields.ToolFields, requests.Tool, set()),
    (message_fields.FunctionFields, requests.FunctionDefinition, set()),
    (message_fields.NamedToolFields, requests.NamedTool, set()),
    (message_fields.FunctionNameFields, requests.FunctionName, set()),
    (fields.StreamOptionsFields, requests.StreamOptions, set()),
    (fields.ResponseFormatFields, requests.ResponseFormat, set()),
    (fields.JsonSchemaFields, requests.JsonSchema, set()),
    (fields.StructuredOutputsFields, requests.StructuredOutputs, set()),
]


@pytest.mark.parametrize(("said", "taken", "set_by_the_method"), ROUTES)
def test_every_field_of_a_request_can_be_said(said: Any, taken: Any, set_by_the_method: set[str]) -> None:
    names = {field.alias or name for name, field in taken.model_fields.items()}
    assert get_type_hints(said).keys() == names - set_by_the_method


@pytest.mark.parametrize(("said", "taken", "_"), ROUTES)
def test_what_must_be_said_is_required(said: Any, taken: Any, _: set[str]) -> None:
    required = {field.alias or name for name, field in taken.model_fields.items() if field.is_required()}
    assert said.__required_keys__ == required
