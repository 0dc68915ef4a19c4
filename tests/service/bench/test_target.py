"""What is found out about a server before it is measured."""

from pathlib import Path
from typing import Any

import pytest

from service.bench.errors import BenchError
from service.bench.target import Target, find_target
from service.bench.tokenizers import tokenizer_of
from service.client import ApiError, AsyncClient
from tests.service.bench.fake_server import FakeServer
from tests.service.bench.virtual_time import run_virtually


def found(server: FakeServer, *, tokenizer: str | None = None, key: str | None = None, **asked: Any) -> Target:
    async def run() -> Target:
        async with AsyncClient("http://server.test", key, transport=server, retries=0) as client:
            options = {"endpoint": "completions", "model": None, "as_text": False} | asked
            return await find_target(client, tokenizer_of(client, tokenizer), **options)

    return run_virtually(run())


def test_the_first_model_is_the_default() -> None:
    server = FakeServer()
    assert found(server).model == "org/served"
    assert "/v1/models" in server.asked


def test_a_model_that_is_named_is_not_looked_up() -> None:
    server = FakeServer()
    assert found(server, model="org/served").model == "org/served"
    assert "/v1/models" not in server.asked


def test_the_first_request_is_short() -> None:
    server = FakeServer()
    found(server)
    (body,) = server.bodies
    assert (len(body["prompt"]), body["max_tokens"], body["temperature"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [
        ((), (True, True)),
        (("ignore_eos",), (False, True)),
        (("ignore_eos", "stream_options"), (False, False)),
    ],
)
def test_fields_that_a_server_does_not_know_are_left_out(unknown: tuple[str, ...], expected: tuple[bool, bool]) -> None:
    server = FakeServer(unknown=unknown)
    target = found(server)
    assert (target.ignore_eos, target.include_usage) == expected
    assert not set(unknown) & set(target.call([1], 1).body)


def test_a_server_that_refuses_everything_is_told_so() -> None:
    with pytest.raises(BenchError, match="refuses even the plainest request: 400 invalid_value: temperature"):
        found(FakeServer(unknown=("temperature",)))


@pytest.mark.parametrize(
    ("endpoint", "as_text", "overhead"), [("chat", True, 7), ("generate", True, 7), ("completions", False, 0)]
)
def test_what_is_put_around_a_prompt_is_measured(endpoint: str, as_text: bool, overhead: int) -> None:
    assert found(FakeServer(overhead=7), endpoint=endpoint, as_text=as_text).overhead == overhead


def test_without_usage_nothing_is_known_of_it() -> None:
    assert found(FakeServer(overhead=7, has_usage=False), as_text=True).overhead == 0


@pytest.mark.parametrize(
    ("server", "asked", "status"),
    [
        (FakeServer(key="secret"), {}, 401),
        (FakeServer(key="secret"), {"model": "org/served"}, 401),
        (FakeServer(), {"model": "nope"}, 404),
        (FakeServer(max_running=0), {}, 429),
    ],
)
def test_a_refusal_comes_as_it_is(server: FakeServer, asked: Any, status: int) -> None:
    with pytest.raises(ApiError) as raised:
        found(server, **asked)
    assert raised.value.status == status


def test_a_key_opens() -> None:
    assert found(FakeServer(key="secret"), key="secret").model == "org/served"


def test_a_server_without_tokenize_needs_a_tokenizer(embedded_model_folder: Path) -> None:
    with pytest.raises(BenchError, match="name a --tokenizer"):
        found(FakeServer(has_tokenize=False))
    server = FakeServer(has_tokenize=False)
    assert found(server, tokenizer=str(embedded_model_folder)).vocabulary.words
    assert "/tokenize" not in server.asked
