"""JSON of random schemas out of the embedded model, at temperature 1: what is complete validates, and what was cut is
said to have been cut. The judge is `jsonschema`, which knows nothing of how grammars are compiled here.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import jsonschema
import pytest

from tests.serving import DEADLINE, EventStream, HttpServer, read_stream, real_server

SCHEMAS = 50
MAX_TOKENS = 90
FORMATS = ("date", "uuid", "ipv4", "email")
PATTERNS = ("^[A-Z][a-z]{1,6}$", "^(on|off)$", r"^\d{3}-\d{2}$", "^#[0-9a-f]{6}$", "^[a-z]+@[a-z]+\\.org$")
NAMES = ("name", "size", "a b", "état", "x-1", '"q"', "nested", "list")

Schema = dict[str, Any]
Kind = Callable[[int], Schema]


class SchemaDice:
    """Random schemas: objects, arrays, alternatives, constants, strings and numbers of every kind, nested."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def document(self) -> Schema:
        """A schema whose values are objects or arrays."""
        kinds: list[Kind] = [self._object, self._object, self._array]
        return self._dice.choice(kinds)(2)

    def _any(self, depth: int) -> Schema:
        kinds: list[Kind] = [*(3 * [self._string]), self._integer, self._number, self._enum, self._const, self._boolean]
        if depth > 0:
            kinds += [self._object, self._array, self._alternatives]
        return self._dice.choice(kinds)(depth - 1)

    def _object(self, depth: int) -> Schema:
        names = self._dice.sample(NAMES, self._dice.randint(1, 3))
        required = [name for name in names if self._dice.random() < 0.7]
        properties = {name: self._any(depth) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        least = self._dice.randint(0, 2)
        most = least + self._dice.randint(0, 1)
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": max(1, most)}

    def _alternatives(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth), self._any(depth), {"type": "null"}]}

    def _string(self, _: int) -> Schema:
        least = self._dice.randint(0, 3)
        kinds: list[Schema] = [
            {"pattern": self._dice.choice(PATTERNS)},
            {"format": self._dice.choice(FORMATS)},
            {"minLength": least, "maxLength": least + self._dice.randint(0, 8)},
        ]
        return {"type": "string"} | self._dice.choice(kinds)

    def _integer(self, _: int) -> Schema:
        least = self._dice.randint(-1000, 1000)
        return {"type": "integer", "minimum": least, "maximum": least + self._dice.randint(0, 500)}

    def _number(self, _: int) -> Schema:
        least = round(self._dice.uniform(-50, 50), 2)
        lower, upper = self._dice.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        return {"type": "number", lower: least, upper: round(least + self._dice.uniform(0.5, 40), 2)}

    def _enum(self, _: int) -> Schema:
        return {"enum": self._dice.sample(["red", "", "a\nb", 7, -1.5, True, None, ["x"], {"k": 1}], 3)}

    def _const(self, _: int) -> Schema:
        return {"const": self._dice.choice(["fixed", 12, False, None, [1, 2], {"a": "b"}])}

    def _boolean(self, _: int) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Answer:
    """What came back for one schema."""

    schema: Schema
    text: str
    finish_reason: str
    completion_tokens: int

    def is_valid(self) -> bool:
        """Whether it is JSON that the schema accepts, formats included."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return False
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        return jsonschema.Draft202012Validator(self.schema, format_checker=checker).is_valid(value)


@pytest.fixture(scope="module")
def server(embedded_model_folder: Path) -> Iterator[HttpServer]:
    with real_server(model=str(embedded_model_folder), max_model_len=2048, kv_cache_memory="256MiB") as running:
        yield running


def response_format(schema: Schema) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def ask(client: httpx.AsyncClient, number: int, schema: Schema) -> Answer:
    """In turn as a chat, as a completion and as a stream."""
    body = {"response_format": response_format(schema), "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": number}
    if number % 3 == 0:
        messages = [{"role": "user", "content": "Make up an example, as JSON."}]
        answer = await post(client, "/v1/chat/completions", body | {"messages": messages})
        [choice] = answer["choices"]
        text = choice["message"]["content"]
    elif number % 3 == 1:
        answer = await post(client, "/v1/completions", body | {"prompt": "An example: "})
        [choice] = answer["choices"]
        text = choice["text"]
    else:
        stream = EventStream()
        async with client.stream("POST", "/generate", json=body | {"prompt": "JSON:\n", "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                stream.read(line)
        answer = choice = stream.data[-1]
        text = stream.text
    return Answer(schema, text, choice["finish_reason"], answer["usage"]["completion_tokens"])


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, (body, response.text)
    answer: dict[str, Any] = response.json()
    return answer


async def ask_all(url: str, schemas: list[Schema]) -> list[Answer]:
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE, trust_env=False) as client:
        return await asyncio.gather(*(ask(client, number, schema) for number, schema in enumerate(schemas)))


def test_what_is_complete_is_valid_and_what_is_cut_is_told(server: HttpServer) -> None:
    schemas = [SchemaDice(seed).document() for seed in range(SCHEMAS)]
    answers = asyncio.run(ask_all(server.url, schemas))
    server.wait_until_idle()
    complete = [answer for answer in answers if answer.finish_reason == "stop"]
    for answer in complete:
        assert answer.is_valid(), answer
    for answer in answers:
        if answer.finish_reason != "stop":
            assert answer.finish_reason == "length", answer
            assert answer.completion_tokens == MAX_TOKENS, answer
    assert len(complete) > SCHEMAS / 2  # the others are cut, which says nothing of what is made


def test_the_judge_would_notice() -> None:
    """Of each schema some values are refused, in type, in bounds or in form."""
    for seed in range(SCHEMAS):
        schema = SchemaDice(seed).document()
        jsonschema.Draft202012Validator.check_schema(schema)
        assert not Answer(schema, '"no"', "stop", 1).is_valid()
        assert not Answer(schema, "{", "stop", 1).is_valid()
    kinds = json.dumps([SchemaDice(seed).document() for seed in range(SCHEMAS)])
    for word in ("enum", "const", "anyOf", "pattern", "exclusiveMinimum", "maxLength", "boolean", *FORMATS):
        assert f'"{word}"' in kinds


class TestCut:
    SCHEMA: ClassVar[Schema] = {"type": "object", "properties": {"text": {"const": "one, two"}}, "required": ["text"]}

    def body(self, **fields: Any) -> dict[str, Any]:
        shape = response_format(self.SCHEMA | {"additionalProperties": False})
        return {"prompt": "JSON: ", "response_format": shape, "temperature": 0, **fields}

    def test_by_length(self, server: HttpServer) -> None:
        for stream in (False, True):
            if stream:
                data = read_stream(server.client, "/v1/completions", self.body(max_tokens=3)).data
                text = "".join(event["choices"][0]["text"] for event in data)
                reasons = [event["choices"][0]["finish_reason"] for event in data]
                assert [reason for reason in reasons if reason] == ["length"]
            else:
                [choice] = server.client.post("/v1/completions", json=self.body(max_tokens=3)).json()["choices"]
                text = choice["text"]
                assert choice["finish_reason"] == "length"
            with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
                json.loads(text)

    def test_by_a_stop_string(self, server: HttpServer) -> None:
        """A stop string ends any text, also one that has to become JSON: it is not a fault of the grammar."""
        for path in ("/v1/completions", "/generate"):
            answer = server.client.post(path, json=self.body(max_tokens=60, stop="two")).json()
            choice = answer.get("choices", [answer])[0]
            assert choice["finish_reason"] == "stop"
            assert choice["text"].endswith('"one, ')

    def test_by_nothing(self, server: HttpServer) -> None:
        answer = server.client.post("/generate", json=self.body(max_tokens=60)).json()
        assert answer["finish_reason"] == "stop"
        assert json.loads(answer["text"]) == {"text": "one, two"}
