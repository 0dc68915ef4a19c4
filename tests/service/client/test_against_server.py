"""The clients against the server itself, on its fake model, over real HTTP."""

import asyncio
from typing import Any

import httpx
import pytest

from service.api.responses import GenerateResponse
from service.client import ApiError, AsyncClient, Client
from tests.serving import DEADLINE, FakeServer, fake_server

LONG = 60  # tokens that fit the fake model


def blocking(server: FakeServer, retries: int = 0) -> Client:
    return Client(server.url, timeout=DEADLINE, retries=retries, transport=httpx.HTTPTransport())


def cancelled(server: FakeServer) -> float:
    return server.samples()["ropewalk_request_success_total{finished_reason=cancelled}"]


def test_every_method_is_understood_by_the_server() -> None:
    with fake_server() as server, blocking(server) as client:
        whole = client.generate(prompt="abc", max_tokens=5, rope={"growth": "stop"}, logprobs=1)
        assert len(whole.token_ids) == 5
        with client.stream_generate(prompt="abc", max_tokens=5) as generated:
            *chunks, last = generated
        assert isinstance(last, GenerateResponse)
        assert "".join(chunk.text for chunk in [*chunks, last]) == whole.text
        completed = client.complete(prompt=[97, 98, 99], max_tokens=5)
        assert completed.choices[0].text == whole.text
        with client.stream_complete(prompt="abc", max_tokens=5, stream_options={"include_usage": True}) as pieces:
            parts = list(pieces)
        assert "".join(choice.text for part in parts for choice in part.choices) == whole.text
        assert parts[-1].usage == whole.usage
        answer = client.chat(messages=[{"role": "user", "content": "hi"}], max_tokens=4)
        with client.stream_chat(messages=[{"role": "user", "content": "hi"}], max_tokens=4) as said:
            text = "".join(choice.delta.content or "" for part in said for choice in part.choices)
        assert text == answer.choices[0].message.content
        tokens = client.tokenize(prompt="abc").tokens
        assert client.detokenize(tokens).prompt == "abc"
        assert client.plan(prompt_tokens=100, max_tokens=5).mode == "static"
        (card,) = client.models().data
        assert client.model(card.id) == card
        assert (client.health().status, client.ready().model) == ("alive", card.id)
        assert "ropewalk_prompt_tokens_total" in client.metrics()


def test_request_ids_go_in_and_come_out() -> None:
    with fake_server() as server, blocking(server) as client:
        assert client.generate(prompt="abc", max_tokens=1, request_id="mine").id == "gen-mine"
        with client.stream_complete(prompt="abc", max_tokens=1, request_id="other") as stream:
            assert stream.request_id == "other"
            list(stream)
        with pytest.raises(ApiError) as raised:
            client.generate(prompt="a" * 999, request_id="third")
        told = raised.value
        assert (told.status, told.code, told.param) == (400, "context_length_exceeded", "prompt")
        assert told.request_id == "third"


def test_leaving_a_stream_ends_its_request() -> None:
    with fake_server() as server, blocking(server) as client:
        with (
            server.gate.closed(),
            client.stream_generate(prompt="abc", max_tokens=LONG) as stream,
        ):
            server.gate.wait_until_reached()
            server.gate.pass_one_step()
            next(iter(stream))
        server.wait_until_idle()
        assert cancelled(server) == 1


def test_cancelling_a_task_that_reads_a_stream_ends_its_request() -> None:
    async def read(url: str, begun: asyncio.Event) -> None:
        async with (
            AsyncClient(url, timeout=DEADLINE, transport=httpx.AsyncHTTPTransport()) as client,
            client.stream_generate(prompt="abc", max_tokens=LONG) as stream,
        ):
            async for _ in stream:
                begun.set()

    async def cancel_once_begun(server: FakeServer) -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(read(server.url, begun))
        await asyncio.to_thread(server.gate.wait_until_reached)
        await asyncio.to_thread(server.gate.pass_one_step)
        await asyncio.wait_for(begun.wait(), DEADLINE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with fake_server() as server:
        with server.gate.closed():
            asyncio.run(cancel_once_begun(server))
        server.wait_until_idle()
        assert cancelled(server) == 1


def test_a_failure_in_a_stream_is_raised() -> None:
    with fake_server() as server, blocking(server) as client:
        read: list[Any] = []
        with server.gate.closed(), client.stream_generate(prompt="abc", max_tokens=LONG) as stream:
            server.gate.wait_until_reached()
            server.gate.pass_one_step()
            server.gate.fault = RuntimeError("the fault of the test")
            server.gate.open()
            with pytest.raises(ApiError) as raised:
                read.extend(stream)
        assert read
        assert (raised.value.status, raised.value.code) == (200, "generation_failed")
        server.gate.fault = None
        server.wait_until_idle()
