"""What a client can ask about the model without running it."""

from typing import Any

import httpx
import pytest

from model_patches.schemes import SCHEMES
from service.scaling.explain import explain
from service.scaling.policy import Policy, RopeWish
from tests.fakes import GEOMETRY
from tests.serving import MODEL, FakeServer, error_of

POLICY = Policy(GEOMETRY)
EDGES = sorted({max(1, POLICY.coverage(rung) + step) for rung in POLICY.ladder for step in (-1, 0, 1)} | {1, 2})


def test_the_model_is_listed_with_what_requests_can_ask_for(server: FakeServer) -> None:
    answer = server.client.get("/v1/models").json()
    assert answer["object"] == "list"
    (card,) = answer["data"]
    assert isinstance(card.pop("created"), int)
    assert set(card.pop("rope_schemes")) <= SCHEMES.keys()
    assert card == {
        "id": MODEL,
        "object": "model",
        "owned_by": "ropewalk",
        "max_model_len": 256,
        "native_length": 64,
        "rope_factors": list(POLICY.ladder),
    }


def test_the_model_is_found_by_its_name_and_no_other_is(client: httpx.Client) -> None:
    assert client.get(f"/v1/models/{MODEL}").json() == client.get("/v1/models").json()["data"][0]
    response = client.get("/v1/models/some/other")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_every_listed_scheme_and_factor_is_granted(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert len(card["rope_schemes"]) > 1
    for scheme in card["rope_schemes"]:
        factors = card["rope_factors"] if scheme != "default" else [1]
        for factor in factors:
            wish = {"scheme": scheme, "factor": factor}
            response = client.post("/v1/rope/plan", json={"prompt_tokens": 5, "max_tokens": 1, "rope": wish})
            assert response.status_code == 200, response.text
            assert response.json()["factor"] == factor


def test_openais_client_lists_the_model(server: FakeServer) -> None:
    with server.openai() as openai:
        assert [model.id for model in openai.models.list()] == [MODEL]


@pytest.mark.parametrize("prompt_tokens", [length for length in EDGES if length < POLICY.max_length])
@pytest.mark.parametrize("asked", [1, 10, "to the native length", "one more", "to the maximum", None])
def test_the_plan_at_every_edge_is_the_policys(
    client: httpx.Client, prompt_tokens: int, asked: int | str | None
) -> None:
    named = {
        "to the native length": max(1, 64 - prompt_tokens),
        "one more": max(1, 65 - prompt_tokens),
        "to the maximum": POLICY.max_length - prompt_tokens,
    }
    max_tokens = named[asked] if isinstance(asked, str) else asked
    if max_tokens is not None and prompt_tokens + max_tokens > POLICY.max_length:
        max_tokens = POLICY.max_length - prompt_tokens
    answer = client.post("/v1/rope/plan", json={"prompt_tokens": prompt_tokens, "max_tokens": max_tokens}).json()
    assert answer == explain(POLICY.choose(prompt_tokens, max_tokens), POLICY, prompt_tokens)


@pytest.mark.parametrize("prompt_tokens", [POLICY.max_length, POLICY.max_length + 1])
def test_no_plan_covers_a_prompt_of_the_maximum_length(client: httpx.Client, prompt_tokens: int) -> None:
    response = client.post("/v1/rope/plan", json={"prompt_tokens": prompt_tokens})
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    "wish",
    [
        {"scheme": "linear"},
        {"factor": 2},
        {"mode": "static"},
        {"mode": "dynamic"},
        {"mode": "native"},
        {"scheme": "ntk", "factor": 4, "growth": "stop"},
        {"growth": "reprefill"},
        {"prefix_reuse": "rerotate"},
    ],
)
def test_the_plan_of_a_wish_is_the_policys(client: httpx.Client, wish: dict[str, Any]) -> None:
    answer = client.post("/v1/rope/plan", json={"prompt_tokens": 50, "max_tokens": 30, "rope": wish}).json()
    assert answer == explain(POLICY.choose(50, 30, RopeWish(**wish)), POLICY, 50)


def test_a_plan_is_what_a_request_then_gets(client: httpx.Client) -> None:
    for length in (5, 90, 200):  # none of which outgrows its plan
        body = {"prompt": [70] * length, "max_tokens": 20}
        planned = client.post("/v1/rope/plan", json=body).json()
        assert planned["prompt_tokens"] == length
        rope = client.post("/generate", json=body).json()["rope"]
        for field in rope.keys() - {"rerotations", "other_plan_prefix_tokens"}:
            assert rope[field] == planned[field]


MESSAGES = [{"role": "user", "content": "Hello 12"}]


@pytest.mark.parametrize(
    ("body", "param", "given"),
    [
        ({}, "prompt", "none"),
        ({"prompt": "a", "prompt_tokens": 1}, "prompt_tokens", "prompt and prompt_tokens"),
        ({"messages": MESSAGES, "prompt_tokens": 1}, "prompt_tokens", "messages and prompt_tokens"),
        ({"prompt": "a", "messages": MESSAGES}, "messages", "prompt and messages"),
    ],
)
def test_a_plan_needs_a_prompt_or_messages_or_a_length_and_only_one(
    client: httpx.Client, body: dict[str, Any], param: str, given: str
) -> None:
    error = error_of(client.post("/v1/rope/plan", json=body))
    assert error["param"] == param
    assert error["message"] == f"give one of prompt, messages and prompt_tokens, not {given}"


def test_the_plan_of_a_conversation_is_that_of_its_rendered_tokens(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3}
    planned = client.post("/v1/rope/plan", json=body).json()
    assert planned["prompt_tokens"] == client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    long = {"messages": [{"role": "user", "content": "a" * 300}]}
    error = error_of(client.post("/v1/rope/plan", json=long))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("text", ["Hello, rope!", " leading", "x  12\n\ty", "<user>hi<assistant>", "a" * 256, ""])
def test_a_text_comes_back_from_its_tokens(client: httpx.Client, text: str) -> None:
    answer = client.post("/tokenize", json={"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_tokens_are_those_that_a_request_is_charged_for(client: httpx.Client) -> None:
    text = "<user>Hello 12<assistant>"
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert tokens == [2, *b"Hello 12", 3]
    usage = client.post("/generate", json={"prompt": text, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(tokens)


def test_more_tokens_than_the_maximum_length_are_not_detokenized(client: httpx.Client) -> None:
    error = error_of(client.post("/detokenize", json={"tokens": [65] * 257}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "tokens")
    assert "257" in error["message"]
    assert "256" in error["message"]


def test_a_token_beyond_the_vocabulary_cannot_be_detokenized(client: httpx.Client) -> None:
    response = client.post("/detokenize", json={"tokens": [128]})
    assert response.status_code == 400
    assert "128" in error_of(response)["message"]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/v1/rope/plan", {"prompt_tokens": 5})])
@pytest.mark.parametrize(
    "extra", [{"tools": []}, {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}]
)
def test_what_only_a_template_reads_is_refused_without_a_conversation(
    client: httpx.Client, path: str, body: dict[str, Any], extra: dict[str, Any]
) -> None:
    error = error_of(client.post(path, json=body | extra))
    [name] = extra
    assert (error["param"], error["message"]) == (name, f"{name}: goes only with messages")
