"""What clients see of models that rotate nothing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from model_patches.encoding import FixedEncoding
from service.scaling.explain import explain
from service.scaling.fixed import FixedPolicy
from tests.serving import FakeServer, error_of, fake_server

POLICIES = {
    "learned": FixedPolicy(FixedEncoding("learned", 64)),
    "sinusoidal": FixedPolicy(FixedEncoding("sinusoidal", 64), max_length=128),
    "alibi": FixedPolicy(FixedEncoding("alibi", 64, (0.5,))),
}
ROUTES = {
    "/generate": {},
    "/v1/completions": {"model": "fake-model"},
    "/v1/chat/completions": {"model": "fake-model"},
}


@pytest.fixture(scope="module", params=POLICIES)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[FakeServer, FixedPolicy]]:
    policy, server = POLICIES[request.param], fake_server()
    server.inspected = replace(server.inspected, policy=policy)
    with server:
        yield server, policy


def asking(route: str, prompt: str, **fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"messages": [{"role": "user", "content": prompt}]} if "chat" in route else {"prompt": prompt}
    )
    return {**ROUTES[route], **said, **fields}


@pytest.mark.parametrize("route", ROUTES)
def test_answers_say_what_the_positions_are(served: tuple[FakeServer, FixedPolicy], route: str) -> None:
    server, policy = served
    answer = server.client.post(route, json=asking(route, "hello", max_tokens=4))
    assert answer.status_code == 200, answer.text
    rope = answer.json()["rope"]
    assert rope["reason"].startswith(f"{policy.encoding.kind} positions, never scaled: prompt of ")
    assert rope["reason"].endswith("fits the native length 64")
    told = {name: rope[name] for name in ("scheme", "mode", "factor", "growth", "rerotations", "native_length")}
    assert told == {
        **{"scheme": policy.encoding.kind, "mode": "native", "factor": 1.0},
        **{"growth": "stop", "rerotations": 0, "native_length": 64},
    }
    name = f"ropewalk_request_plan_total{{factor=1,mode=native,scheme={policy.encoding.kind}}}"
    assert server.samples()[name] >= 1


def test_a_request_beyond_training_says_how_far(served: tuple[FakeServer, FixedPolicy]) -> None:
    server, policy = served
    answer = server.client.post("/generate", json={"prompt": "x" * 70, "max_tokens": 10})
    if policy.encoding.has_end:
        assert answer.status_code == 400
        assert "beyond the last there is none" in error_of(answer)["message"]
    else:
        assert answer.json()["rope"]["reason"].endswith("to generate reaches 1.25 times the native length 64")
        assert answer.json()["usage"]["completion_tokens"] <= 10


@pytest.mark.parametrize("route", ROUTES)
def test_one_token_too_many_is_refused(served: tuple[FakeServer, FixedPolicy], route: str) -> None:
    server, policy = served
    answer = server.client.post(route, json=asking(route, "x" * (policy.max_length - 10), max_tokens=11))
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"maximum length {policy.max_length}" in error["message"]


@pytest.mark.parametrize("route", [*ROUTES, "/v1/rope/plan"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("scheme", "yarn"), ("factor", 2), ("mode", "dynamic"), ("growth", "rerotate"), ("prefix_reuse", "rerotate")],
)
def test_a_wish_for_scaling_is_refused_with_the_reason(
    served: tuple[FakeServer, FixedPolicy], route: str, name: str, value: Any
) -> None:
    server, policy = served
    fields = {"rope": {name: value}, "max_tokens": 4}
    body = {"prompt_tokens": 5, **fields} if route == "/v1/rope/plan" else asking(route, "hello", **fields)
    answer = server.client.post(route, json=body)
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"]) == (400, f"rope.{name}", "rope_not_available")
    assert policy.why in error["message"]


def test_the_plan_without_a_request(served: tuple[FakeServer, FixedPolicy]) -> None:
    server, policy = served
    answer = server.client.post("/v1/rope/plan", json={"prompt_tokens": 50, "max_tokens": 10})
    assert answer.json() == explain(policy.choose(50, 10), policy, 50)


def test_the_model_is_listed_with_its_one_scheme(served: tuple[FakeServer, FixedPolicy]) -> None:
    server, policy = served
    (card,) = server.client.get("/v1/models").json()["data"]
    assert (card["rope_schemes"], card["rope_factors"]) == ([policy.encoding.kind], [1.0])
    assert (card["native_length"], card["max_model_len"]) == (64, policy.max_length)
    described = server.client.get("/openapi.json").json()["components"]["schemas"]["RopeWishFields"]["properties"]
    assert [policy.encoding.kind] in [kind.get("enum") for kind in described["scheme"]["anyOf"]]
