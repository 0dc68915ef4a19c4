"""Bias, penalties, log-probabilities and constraints: what a request asks for reaches the engine, and comes back."""

import json
import math
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model_patches.loading.generation import GenerationDefaults
from service.api.logprobs import LogprobShapes
from tests.fakes import VOCABULARY, expected_output
from tests.serving import END_TOKEN, MODEL, FakeServer, byte_tokenizer, error_of, fake_server, read_stream

PROMPT = "Once upon a time"
OUTPUT = expected_output(list(PROMPT.encode()), 4)
CHAT_OUTPUT = expected_output([2, *b"Hi", 3], 4)  # <user>Hi<assistant>
GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions")
LIKELY = -math.log(1 + (VOCABULARY - 1) * math.exp(-10))  # the fake model's token has logit 10, all others 0
UNLIKELY = LIKELY - 10


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": PROMPT}
    return prompt | {"max_tokens": 4} | fields


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0] if "choices" in answer else answer
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def ask(client: httpx.Client, path: str, **fields: Any) -> str:
    response = client.post(path, json=body_for(path, **fields))
    assert response.status_code == 200, response.text
    return text_of(response.json())


class TestBiasAndPenalties:
    @pytest.mark.parametrize("path", GENERATING)
    def test_a_bias_forces_a_token(self, client: httpx.Client, path: str) -> None:
        assert ask(client, path, logit_bias={str(ord("z")): 100}) == "zzzz"

    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("presence_penalty", 2, "zyzz"),
            ("frequency_penalty", 2, "zyzy"),
            ("repetition_penalty", 1.02, "zyzz"),
        ],
    )
    def test_a_penalty_makes_room_for_another_token(
        self, client: httpx.Client, field: str, value: float, expected: str
    ) -> None:
        bias = {str(ord("z")): 51.5, str(ord("y")): 50.5}  # so much that the model's own choice is neither
        assert ask(client, "/generate", logit_bias=bias) == "zzzz"
        assert ask(client, "/generate", logit_bias=bias, **{field: value}) == expected

    def test_the_models_own_repetition_penalty_holds_unless_the_request_says_otherwise(self) -> None:
        defaults = GenerationDefaults(frozenset(), temperature=0.0, repetition_penalty=1.1)
        bias = {str(ord("z")): 51.5, str(ord("y")): 50.5}
        with fake_server(generation=defaults) as server:
            assert ask(server.client, "/generate", logit_bias=bias).startswith("zy")
            assert ask(server.client, "/generate", logit_bias=bias, repetition_penalty=1) == "zzzz"


class TestLogprobs:
    @pytest.mark.parametrize("stream", [False, True])
    def test_generate(self, client: httpx.Client, stream: bool) -> None:
        body = body_for("/generate", logprobs=2)
        if stream:
            events = read_stream(client, "/generate", body).data
            assert "logprobs" not in events[-1]
            told = [entry for event in events[:-1] for entry in event["logprobs"]]
        else:
            told = client.post("/generate", json=body).json()["logprobs"]
        assert [entry["token_id"] for entry in told] == OUTPUT
        for entry, token in zip(told, OUTPUT, strict=True):
            assert set(entry) == {"token_id", "token", "logprob", "top"}
            assert entry["token"] == chr(token)
            assert entry["logprob"] == pytest.approx(LIKELY, abs=1e-5)
            first, second = entry["top"]
            assert first == {"token_id": token, "token": chr(token), "logprob": entry["logprob"]}
            assert second["logprob"] == pytest.approx(UNLIKELY, abs=1e-5)

    def test_none_are_told_unless_asked_for(self, client: httpx.Client) -> None:
        assert "logprobs" not in client.post("/generate", json=body_for("/generate")).json()
        for path in GENERATING[1:]:
            [choice] = client.post(path, json=body_for(path)).json()["choices"]
            assert choice["logprobs"] is None

    @pytest.mark.parametrize("stream", [False, True])
    def test_completions(self, client: httpx.Client, stream: bool) -> None:
        path = "/v1/completions"
        body = body_for(path, logprobs=1, logit_bias={str(ord("z")): 100})
        answers = read_stream(client, path, body).data if stream else [client.post(path, json=body).json()]
        choices = [answer["choices"][0] for answer in answers]
        if stream:
            assert choices.pop()["logprobs"] is None
        parts = [Logprobs.model_validate(choice["logprobs"]) for choice in choices]
        assert len(parts) == (4 if stream else 1)
        assert [token for part in parts for token in part.tokens or ()] == ["z"] * 4
        assert [at for part in parts for at in part.text_offset or ()] == [0, 1, 2, 3]
        assert [value for part in parts for value in part.token_logprobs or ()] == pytest.approx([UNLIKELY] * 4)
        # The likeliest token is the model's; the one that was forced is told too.
        tops = [top for part in parts for top in part.top_logprobs or ()]
        assert tops[0] == pytest.approx({chr(OUTPUT[0]): LIKELY, "z": UNLIKELY}, abs=1e-5)

    @pytest.mark.parametrize("stream", [False, True])
    def test_chat(self, client: httpx.Client, stream: bool) -> None:
        path = "/v1/chat/completions"
        body = body_for(path, logprobs=True, top_logprobs=3)
        if stream:
            chunks = [ChatCompletionChunk.model_validate(each) for each in read_stream(client, path, body).data]
            told = [e for c in chunks for e in (c.choices[0].logprobs and c.choices[0].logprobs.content) or ()]
        else:
            logprobs = ChatCompletion.model_validate(client.post(path, json=body).json()).choices[0].logprobs
            assert logprobs is not None
            told = logprobs.content or []
        assert [entry.token for entry in told] == list(map(chr, CHAT_OUTPUT))
        assert [entry.bytes for entry in told] == [[token] for token in CHAT_OUTPUT]
        for entry in told:
            assert entry.logprob == pytest.approx(LIKELY, abs=1e-5)
            assert len(entry.top_logprobs) == 3
            assert entry.top_logprobs[0].model_dump() == entry.model_dump(exclude={"top_logprobs"})

    def test_a_chat_without_top_logprobs_has_the_tokens_own_only(self, server: FakeServer) -> None:
        with server.openai() as openai:
            answer = openai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, logprobs=True
            )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [entry.top_logprobs for entry in logprobs.content] == [[]] * 4

    def test_a_token_without_text_has_its_entry_in_a_stream(self, client: httpx.Client) -> None:
        """The end token is a token like any other."""
        bias = {str(END_TOKEN): 100}
        for path, field, value in (("/v1/completions", "logprobs", 0), ("/v1/chat/completions", "logprobs", True)):
            events = read_stream(client, path, body_for(path, logit_bias=bias, **{field: value})).data
            told = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
            assert len(told) == 1
            assert "<end>" in json.dumps(told[0])

    def test_top_logprobs_alone_is_refused(self, client: httpx.Client) -> None:
        path = "/v1/chat/completions"
        for fields in ({"top_logprobs": 0}, {"top_logprobs": 2, "logprobs": False}):
            error = error_of(client.post(path, json=body_for(path, **fields)))
            assert (error["param"], error["message"]) == ("top_logprobs", "top_logprobs goes only with logprobs: true")


class TestTokenTexts:
    def test_a_part_of_a_character_has_its_own_bytes(self) -> None:
        alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        backend = Tokenizer(models.BPE(alphabet, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        shapes = LogprobShapes(backend)
        ids = backend.encode("é €\n").ids
        assert bytes(byte for token in ids for byte in shapes.bytes(token)).decode() == "é €\n"
        assert shapes.text(ids[0]) == "\ufffd"
        assert shapes.text(ids[2]) == " "

    def test_a_space_at_the_beginning_is_kept_and_byte_tokens_are_bytes(self) -> None:
        backend = Tokenizer(models.BPE({"▁Paris": 0, "<0xE2>": 1}, []))
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        shapes = LogprobShapes(backend)
        assert (shapes.text(0), bytes(shapes.bytes(0))) == (" Paris", b" Paris")
        assert shapes.bytes(1) == [0xE2]

    def test_special_tokens_are_shown(self) -> None:
        backend: Tokenizer = byte_tokenizer().backend_tokenizer
        shapes = LogprobShapes(backend)
        assert (shapes.text(END_TOKEN), bytes(shapes.bytes(END_TOKEN))) == ("<end>", b"<end>")


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
SHORT: dict[str, Any] = {
    "max_tokens": 60,
    "logit_bias": {"32": -100, "9": -100, "10": -100, "13": -100},
}  # without blanks
NAMED: dict[str, Any] = {"name": "thing", "schema": SCHEMA, "strict": True}


class TestConstraints:
    @pytest.mark.parametrize("path", GENERATING)
    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, '{"a":"b"}'),
            ({"structured_outputs": {"json": SCHEMA}}, '{"a":"b"}'),
            ({"structured_outputs": {"regex": "[a]{3}b"}}, "aaab"),
            ({"structured_outputs": {"choice": ["maybe"]}}, "maybe"),
            ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, "xy"),
        ],
    )
    def test_the_text_matches_and_ends_there(
        self, client: httpx.Client, path: str, fields: dict[str, Any], expected: str
    ) -> None:
        response = client.post(path, json=body_for(path, **SHORT, **fields))
        assert response.status_code == 200, response.text
        answer = response.json()
        assert text_of(answer) == expected
        assert answer.get("finish_reason") or answer["choices"][0]["finish_reason"] == "stop"

    def test_any_json_object_begins_with_a_brace(self, client: httpx.Client) -> None:
        text = ask(client, "/v1/chat/completions", **SHORT, response_format={"type": "json_object"})
        assert text.startswith("{")

    def test_text_is_no_constraint_and_goes_with_one(self, client: httpx.Client) -> None:
        plain = ask(client, "/v1/completions")
        assert ask(client, "/v1/completions", response_format={"type": "text"}) == plain
        both = {"response_format": {"type": "text"}, "structured_outputs": {"choice": ["b"]}}
        assert ask(client, "/v1/completions", **both) == "b"

    def test_openais_client_asks_for_a_schema(self, server: FakeServer) -> None:
        with server.openai() as openai:
            assert self.ask_for_schema(openai) == {"a": "b"}

    def ask_for_schema(self, openai: OpenAI) -> Any:
        answer = openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=60,
            logit_bias=SHORT["logit_bias"],
            response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
        )
        return json.loads(answer.choices[0].message.content or "")

    @pytest.mark.parametrize(
        ("fields", "param", "said"),
        [
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
            (
                {"response_format": {"type": "json_object", "json_schema": NAMED}},
                "response_format.json_schema",
                "goes only with type json_schema, it is json_object",
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
                "response_format.json_schema.schema",
                "missing",
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
                "response_format.json_schema.name",
                "missing",
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": NAMED | {"schema": {"x-guidance": 1}}}},
                "response_format.json_schema.schema",
                "x-guidance is not supported",
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": NAMED | {"schema": {"type": "pet"}}}},
                "response_format.json_schema.schema",
                "pet",
            ),
            (
                {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
                "structured_outputs",
                "give one",
            ),
            ({"structured_outputs": {"pattern": "a"}}, "structured_outputs.pattern", "not a field"),
            ({"guided_json": {}}, "guided_json", "not a field"),
        ],
    )
    @pytest.mark.parametrize("path", GENERATING)
    def test_what_cannot_be_asked_for_is_refused_by_name(
        self, client: httpx.Client, path: str, fields: dict[str, Any], param: str, said: str
    ) -> None:
        response = client.post(path, json=body_for(path, **fields))
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, param)
        assert said in error["message"], error["message"]

    def test_deep_schemas_are_refused(self, client: httpx.Client) -> None:
        for depth in (200, 600, 800, 900, 940, 960, 980, 1500):
            schema = '{"items":' * depth + "{}" + "}" * depth
            body = f'{{"prompt": "a", "structured_outputs": {{"json": {schema}}}}}'
            response = client.post("/generate", content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400, (depth, response.text)

    def test_a_prompt_that_is_too_long_is_refused_before_the_grammar_is_read(self, client: httpx.Client) -> None:
        body = {"prompt": "x" * 300, "structured_outputs": {"regex": "("}}
        assert error_of(client.post("/generate", json=body))["code"] == "context_length_exceeded"


def test_stream_options_without_a_stream_leave_no_request_behind(server: FakeServer) -> None:
    admitted = sum(value for name, value in server.samples().items() if name.startswith("ropewalk_request_plan_total"))
    response = server.client.post("/v1/completions", json=body_for("/v1/completions", stream_options={}))
    assert error_of(response)["param"] == "stream_options"
    server.wait_until_idle()
    after = sum(value for name, value in server.samples().items() if name.startswith("ropewalk_request_plan_total"))
    assert after == admitted
