"""The operator's limits of one request: what is beyond is refused with the setting's name, and the schema says so."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.api.requests import ChatRequest, CompletionRequest, GenerateRequest, ToleratedFields
from service.settings import Settings
from tests.fakes import expected_output
from tests.serving import FakeServer, error_of, fake_server, read_stream

GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions")
LIMITS: dict[str, Any] = {"max_prompt_tokens": 20, "max_output_tokens": 30, "max_choices": 4}
LIMITS |= {"max_stop_strings": 2, "max_stop_length": 5}


@pytest.fixture(scope="module")
def limited() -> Iterator[FakeServer]:
    with fake_server(**LIMITS) as server:
        yield server


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "ab"}]} if "chat" in path else {"prompt": "ab"}
    return prompt | {"max_tokens": 1} | fields


def refused(server: FakeServer, code: str) -> float:
    return server.samples().get(f"ropewalk_request_refused_total{{code={code}}}", 0)


def completion_tokens(client: httpx.Client, path: str, **fields: Any) -> int:
    response = client.post(path, json=body(path, **fields))
    assert response.status_code == 200, response.text
    tokens: int = response.json()["usage"]["completion_tokens"]
    return tokens


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "within", "beyond", "setting", "param", "said"),
    [
        ("/generate", {"prompt": "x" * 20}, {"prompt": "x" * 21}, "max_prompt_tokens", "prompt", "21 tokens"),
        (
            "/v1/completions",
            {"prompt": ["a", "x" * 20]},
            {"prompt": ["a", [65] * 21]},
            *("max_prompt_tokens", "prompt", "21 tokens"),
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x" * 18}]},
            {"messages": [{"role": "user", "content": "x" * 19}]},
            *("max_prompt_tokens", "messages", "21 tokens"),
        ),
        *(
            (path, {"max_tokens": 30}, {"max_tokens": 31}, "max_output_tokens", "max_tokens", "31")
            for path in GENERATING
        ),
        (
            CHAT,
            {"max_tokens": None, "max_completion_tokens": 30},
            {"max_tokens": None, "max_completion_tokens": 31},
            *("max_output_tokens", "max_completion_tokens", "31"),
        ),
        ("/v1/completions", {"n": 4}, {"n": 5}, "max_choices", "n", "5 choices"),
        (CHAT, {"n": 4}, {"n": 5}, "max_choices", "n", "5 choices"),
        ("/v1/completions", {"prompt": ["a"] * 4}, {"prompt": ["a"] * 5}, "max_choices", "n", "5 choices"),
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "n": 2},
            {"prompt": ["a", "b"], "n": 3},
            *("max_choices", "n", "6 choices"),
        ),
        *(
            (path, {"stop": ["\n", "\t"]}, {"stop": ["\n", "\t", "\r"]}, "max_stop_strings", "stop", "3 stop strings")
            for path in GENERATING
        ),
        *(
            (path, {"stop": "\n" * 5}, {"stop": ["a", "\n" * 6]}, "max_stop_length", "stop", "6 characters")
            for path in GENERATING
        ),
    ],
)
def test_the_limit_itself_is_allowed_and_one_more_refused(
    limited: FakeServer,
    path: str,
    within: dict[str, Any],
    beyond: dict[str, Any],
    setting: str,
    param: str,
    said: str,
) -> None:
    assert limited.client.post(path, json=body(path, **within)).status_code == 200
    before = refused(limited, f"{setting}_exceeded")
    response = limited.client.post(path, json=body(path, **beyond))
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, f"{setting}_exceeded")
    assert said in error["message"]
    assert f"{LIMITS[setting]} ({setting})" in error["message"]
    assert refused(limited, f"{setting}_exceeded") == before + 1
    limited.wait_until_idle()


def test_without_limits_set_none_but_the_maximum_length_counts(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"prompt": "x" * 200, "max_tokens": 56}).json()
    assert answer["usage"]["total_tokens"] == 256


class TestOutputTokens:
    @pytest.mark.parametrize("path", GENERATING)
    def test_the_limit_is_what_a_request_gets_that_asks_for_nothing(self, limited: FakeServer, path: str) -> None:
        assert completion_tokens(limited.client, path, max_tokens=None) == 30

    def test_of_each_choice(self, limited: FakeServer) -> None:
        assert completion_tokens(limited.client, "/v1/completions", max_tokens=None, n=3) == 90

    def test_where_less_remains_the_rest_is_what_it_gets(self) -> None:
        with fake_server(max_output_tokens=30) as server:
            assert completion_tokens(server.client, "/generate", prompt="x" * 240, max_tokens=None) == 16
            assert completion_tokens(server.client, "/generate", prompt="x" * 226, max_tokens=None) == 30

    @pytest.mark.parametrize("rope", [{"mode": "native"}, {"growth": "stop"}, {"factor": 1, "growth": "stop"}])
    def test_a_wish_that_ends_earlier_ends_earlier(self, rope: dict[str, Any]) -> None:
        with fake_server(max_output_tokens=100) as server:
            assert completion_tokens(server.client, "/generate", rope=rope, max_tokens=None) == 62

    def test_the_plan_is_for_no_more_and_rope_plan_says_the_same(self, limited: FakeServer) -> None:
        answer = limited.client.post("/generate", json={"prompt": "x" * 20}).json()
        assert (answer["rope"]["mode"], answer["rope"]["factor"]) == ("native", 1)
        plan = limited.client.post("/v1/rope/plan", json={"prompt": "x" * 20}).json()
        assert (plan["mode"], plan["max_tokens"], plan["reason"]) == ("native", 30, answer["rope"]["reason"])


def test_more_choices_than_can_ever_be_queued_are_beyond_whatever_is_set() -> None:
    with fake_server(max_choices=1000, max_running=2, max_queued=3) as server:
        assert server.client.post("/v1/completions", json=body("", n=5)).status_code == 200
        error = error_of(server.client.post("/v1/completions", json=body("", n=6)))
    assert error["code"] == "max_choices_exceeded"
    assert error["message"].endswith("6 choices; this server allows 5 (max_running + max_queued)")


def test_a_request_beyond_a_limit_costs_no_look_at_its_prompt(limited: FakeServer) -> None:
    error = error_of(limited.client.post("/v1/completions", json={"prompt": [500], "n": 5}))
    assert error["code"] == "max_choices_exceeded"


class TestStopTokens:
    PROMPT = "ab"
    OUTPUT = expected_output([*b"ab"], 40)
    END = OUTPUT[7]
    LENGTH = OUTPUT.index(END) + 1

    @pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_one_ends_the_text_and_is_not_in_it(self, client: httpx.Client, path: str, ignore_eos: bool) -> None:
        fields = {"prompt": self.PROMPT, "max_tokens": 40, "stop_token_ids": [self.END], "ignore_eos": ignore_eos}
        answer = client.post(path, json=fields).json()
        choice = answer["choices"][0] if "choices" in answer else answer
        assert (choice["text"], choice["finish_reason"]) == (bytes(self.OUTPUT[: self.LENGTH - 1]).decode(), "stop")
        assert answer["usage"]["completion_tokens"] == self.LENGTH
        assert read_stream(client, path, fields).text == choice["text"]

    def test_they_stand_beside_the_models_own(self) -> None:
        with fake_server(end_tokens=[self.END]) as server:
            answers = [
                server.client.post("/generate", json={"prompt": "ab", "max_tokens": 40, "stop_token_ids": stops}).json()
                for stops in ([], [self.OUTPUT[2]], [127])
            ]
        assert [len(answer["token_ids"]) for answer in answers] == [
            self.LENGTH,
            self.OUTPUT.index(self.OUTPUT[2]) + 1,
            self.LENGTH,
        ]

    def test_none_counts_before_min_tokens(self, client: httpx.Client) -> None:
        fields = {"prompt": "ab", "max_tokens": 40, "stop_token_ids": [self.END], "min_tokens": self.LENGTH}
        tokens = client.post("/generate", json=fields).json()["token_ids"]
        assert self.END not in tokens[: self.LENGTH]
        assert len(tokens) >= self.LENGTH


class TestTolerated:
    VALUES: dict[str, Any] = {  # noqa: RUF012
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "prompt_cache_retention": "24h",
        "prediction": {"type": "content", "content": "a"},
    }

    def test_all_are_here(self) -> None:
        assert self.VALUES.keys() == ToleratedFields.model_fields.keys()

    @pytest.mark.parametrize("path", ["/v1/completions", CHAT])
    def test_they_change_nothing(self, client: httpx.Client, path: str) -> None:
        plain = client.post(path, json=body(path, max_tokens=8)).json()
        for fields in (self.VALUES, dict.fromkeys(self.VALUES)):
            answer = client.post(path, json=body(path, max_tokens=8, **fields)).json()
            assert answer["choices"] == plain["choices"]

    @pytest.mark.parametrize("field", VALUES)
    def test_the_servers_own_route_does_not_know_them(self, client: httpx.Client, field: str) -> None:
        response = client.post("/generate", json=body("/generate") | {field: self.VALUES[field]})
        assert (response.status_code, error_of(response)["param"]) == (400, field)


class TestDescription:
    def schemas(self, server: FakeServer) -> dict[str, Any]:
        schemas: dict[str, Any] = server.client.get("/openapi.json").json()["components"]["schemas"]
        return schemas

    def kinds(self, schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {kind["type"]: kind for kind in schema.get("anyOf", [schema])}

    def test_every_field_is_there(self, limited: FakeServer) -> None:
        schemas = self.schemas(limited)
        for model in (GenerateRequest, CompletionRequest, ChatRequest):
            names = {field.alias or name for name, field in model.model_fields.items()}
            assert names == schemas[model.__name__]["properties"].keys()
            assert all("description" in schemas[model.__name__]["properties"][name] for name in names - APART)

    def test_a_servers_limits_are_in_its_fields(self, limited: FakeServer) -> None:
        schemas = self.schemas(limited)
        for model in ("GenerateRequest", "CompletionRequest", "ChatRequest"):
            fields = schemas[model]["properties"]
            assert self.kinds(fields["max_tokens"])["integer"] == {"type": "integer", "minimum": 1, "maximum": 30}
            stop = self.kinds(fields["stop"])
            assert (stop["array"]["maxItems"], stop["array"]["items"]["maxLength"]) == (2, 5)
            assert stop["string"]["maxLength"] == 5
            assert "maxLength" not in stop["array"]
        assert self.kinds(schemas["ChatRequest"]["properties"]["max_completion_tokens"])["integer"]["maximum"] == 30
        for model in ("CompletionRequest", "ChatRequest"):
            assert self.kinds(schemas[model]["properties"]["n"])["integer"]["maximum"] == 4
        assert "maximum" not in json.dumps(schemas["GenerateRequest"]["properties"]["n"])

    def test_what_has_the_same_name_elsewhere_is_left_alone(self, limited: FakeServer, server: FakeServer) -> None:
        for model in ("PlanRequest", "PlanResponse"):
            assert self.schemas(limited)[model] == self.schemas(server)[model]

    def test_where_no_limit_is_set_none_is_told(self, server: FakeServer) -> None:
        fields = self.schemas(server)["ChatRequest"]["properties"]
        assert self.kinds(fields["max_tokens"])["integer"]["maximum"] > 2**60
        defaults = Settings.model_validate({})
        assert self.kinds(fields["n"])["integer"]["maximum"] == defaults.max_choices
        assert self.kinds(fields["stop"])["array"]["maxItems"] == defaults.max_stop_strings


APART = {"messages", "stream_options"}
"""Fields that their types describe."""


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_head_answers_as_get_without_a_body(client: httpx.Client, path: str) -> None:
    get, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (200, b"") == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


def test_head_of_what_is_not_ready_is_a_503() -> None:
    with fake_server() as server:
        server.app.state.server.is_draining = True
        assert (server.client.head("/ready").status_code, server.client.head("/ready").content) == (503, b"")
        assert server.client.head("/health").status_code == 200
        server.app.state.server.is_draining = False
