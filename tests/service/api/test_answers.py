"""The three shapes of an answer, whole and streamed, by hand and through OpenAI's own client."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.fakes import expected_output
from tests.serving import MODEL, FakeServer, fake_server, read_stream

PROMPT = "Once upon a time"
OUTPUT = expected_output(list(PROMPT.encode()), 12)
TEXT = bytes(OUTPUT).decode()
CHAT = [{"role": "user", "content": "Hello"}]
CHAT_TEXT = bytes(expected_output([2, *b"Hello", 3], 12)).decode()  # <user>Hello<assistant>
NOTHING_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}
USAGE = {"prompt_tokens": 16, "completion_tokens": 12, "total_tokens": 28, **NOTHING_CACHED}
CHAT_USAGE = {"prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19, **NOTHING_CACHED}
ROPE = {"scheme": "default", "mode": "native", "factor": 1.0, "growth": "stop", "rerotations": 0}
ROPE |= {"prefix_reuse": "same-plan", "other_plan_prefix_tokens": 0, "native_length": 64, "plan_max_length": 64}
TIMES = {"queue_seconds", "prefill_seconds", "decode_seconds", "time_to_first_token_seconds", "total_seconds"}


@pytest.fixture
def openai(server: FakeServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


def assert_rope(rope: dict[str, Any], reason: str) -> None:
    assert rope.pop("reason") == reason
    assert rope == ROPE


def assert_timing(timing: dict[str, float]) -> None:
    assert set(timing) == TIMES
    assert all(value >= 0 for value in timing.values())
    first = timing["time_to_first_token_seconds"]
    assert first == pytest.approx(timing["queue_seconds"] + timing["prefill_seconds"])
    assert timing["total_seconds"] >= first + timing["decode_seconds"]


NATIVE_REASON = "prompt of 16 tokens + 12 to generate fits the native length 64"
CHAT_REASON = "prompt of 7 tokens + 12 to generate fits the native length 64"


class TestGenerate:
    def test_a_whole_answer_has_exactly_the_promised_fields(self, client: httpx.Client) -> None:
        answer = client.post("/generate", json={"prompt": PROMPT, "max_tokens": 12}).json()
        assert answer.pop("id").startswith("gen-")
        assert_rope(answer.pop("rope"), NATIVE_REASON)
        assert_timing(answer.pop("timing"))
        assert answer == {
            "model": MODEL,
            "text": TEXT,
            "token_ids": OUTPUT,
            "finish_reason": "length",
            "usage": USAGE,
        }

    def test_a_stream_brings_a_token_an_event_and_the_facts_in_the_last(self, client: httpx.Client) -> None:
        stream = read_stream(client, "/generate", {"prompt": PROMPT, "max_tokens": 12})
        *events, last = stream.data
        assert not stream.done
        assert [event["token_ids"] for event in events] == [[token] for token in OUTPUT]
        assert all(event["finish_reason"] is None for event in events)
        assert all(set(event) == {"id", "text", "token_ids", "finish_reason"} for event in events)
        assert {event["id"] for event in stream.data} == {last.pop("id")}
        assert stream.text == TEXT
        assert_rope(last.pop("rope"), NATIVE_REASON)
        assert_timing(last.pop("timing"))
        assert last == {"model": MODEL, "text": "", "token_ids": [], "finish_reason": "length", "usage": USAGE}


class TestCompletions:
    BODY = {"prompt": PROMPT, "max_tokens": 12}  # noqa: RUF012

    def test_a_whole_answer_has_exactly_the_promised_fields(self, server: FakeServer) -> None:
        answer = server.client.post("/v1/completions", json=self.BODY).json()
        assert answer.pop("id").startswith("cmpl-")
        assert isinstance(answer.pop("created"), int)
        assert_rope(answer.pop("rope"), NATIVE_REASON)
        assert answer == {
            "object": "text_completion",
            "model": MODEL,
            "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}],
            "usage": USAGE,
        }

    def test_a_stream_ends_in_finish_reason_and_rope_then_done(self, client: httpx.Client) -> None:
        stream = read_stream(client, "/v1/completions", self.BODY)
        *chunks, last = stream.data
        assert stream.done
        assert stream.text == TEXT
        assert all(chunk["object"] == "text_completion" for chunk in stream.data)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream.data}) == 1
        assert all("rope" not in chunk and "usage" not in chunk for chunk in chunks)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 12
        assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
        assert_rope(last["rope"], NATIVE_REASON)
        assert "usage" not in last

    def test_include_usage_adds_a_last_chunk_with_usage_and_rope_and_no_choices(self, client: httpx.Client) -> None:
        stream = read_stream(client, "/v1/completions", self.BODY | {"stream_options": {"include_usage": True}})
        *chunks, last = stream.data
        assert stream.done
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert last["choices"] == []
        assert last["usage"] == USAGE
        assert_rope(last["rope"], NATIVE_REASON)
        assert all("usage" not in chunk for chunk in chunks)

    def test_openais_client_reads_both(self, openai: OpenAI) -> None:
        whole = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (TEXT, "length")
        assert whole.usage is not None
        assert whole.usage.total_tokens == 28
        assert whole.model_extra is not None
        assert whole.model_extra["rope"]["mode"] == "native"
        chunks = list(
            openai.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=12, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == TEXT
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12


class TestChat:
    BODY = {"messages": CHAT, "max_tokens": 12}  # noqa: RUF012

    def test_a_whole_answer_has_exactly_the_promised_fields(self, client: httpx.Client) -> None:
        answer = client.post("/v1/chat/completions", json=self.BODY).json()
        assert answer.pop("id").startswith("chatcmpl-")
        assert isinstance(answer.pop("created"), int)
        assert_rope(answer.pop("rope"), CHAT_REASON)
        message = {"role": "assistant", "content": CHAT_TEXT, "refusal": None}
        assert answer == {
            "object": "chat.completion",
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
            "usage": CHAT_USAGE,
        }

    def test_a_stream_begins_with_the_role_and_ends_in_finish_reason_and_rope(self, client: httpx.Client) -> None:
        stream = read_stream(client, "/v1/chat/completions", self.BODY)
        first, *chunks, last = stream.data
        assert stream.done
        assert stream.text == CHAT_TEXT
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in stream.data)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream.data}) == 1
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in chunks)
        assert all("rope" not in chunk and "usage" not in chunk for chunk in (first, *chunks))
        assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
        assert_rope(last["rope"], CHAT_REASON)
        assert "usage" not in last

    def test_include_usage_adds_a_last_chunk_with_usage_and_rope_and_no_choices(self, client: httpx.Client) -> None:
        body = self.BODY | {"stream_options": {"include_usage": True}}
        stream = read_stream(client, "/v1/chat/completions", body)
        *chunks, last = stream.data
        assert stream.done
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert last["choices"] == []
        assert last["usage"] == CHAT_USAGE
        assert_rope(last["rope"], CHAT_REASON)

    def test_openais_client_reads_both(self, openai: OpenAI) -> None:
        whole = openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=12
        )
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (CHAT_TEXT, "length")
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 7
        assert whole.model_extra is not None
        assert whole.model_extra["rope"]["mode"] == "native"
        chunks = list(
            openai.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=12,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == CHAT_TEXT
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 19


def test_a_scaled_request_says_so_in_every_shape(client: httpx.Client) -> None:
    wanted = {"scheme": "yarn", "mode": "static", "factor": 2.0, "plan_max_length": 128}
    prompt = "x" * 100
    whole = client.post("/generate", json={"prompt": prompt, "max_tokens": 3}).json()["rope"]
    streamed = read_stream(client, "/v1/completions", {"prompt": prompt, "max_tokens": 3}).data[-1]["rope"]
    messages = [{"role": "user", "content": prompt}]
    chat = read_stream(client, "/v1/chat/completions", {"messages": messages, "max_tokens": 3}).data[-1]["rope"]
    for rope in (whole, streamed, chat):
        assert wanted.items() <= rope.items()
        assert "exceeds the native length 64: factor 2" in rope["reason"]


def test_ids_differ(client: httpx.Client) -> None:
    ids = {client.post("/generate", json={"prompt": "a", "max_tokens": 1}).json()["id"] for _ in range(5)}
    assert len(ids) == 5


class TestGrowthAndReuse:
    """What an answer says of a request that did not stay under the plan it began under, or did not begin at zero."""

    def test_a_request_that_grew_names_its_last_plan_and_how_often_its_keys_moved(self, client: httpx.Client) -> None:
        answer = client.post("/generate", json={"prompt": "x" * 60, "max_tokens": 40}).json()
        reason = answer["rope"].pop("reason")
        assert answer["rope"] == {
            **ROPE,
            "scheme": "yarn",
            "mode": "dynamic",
            "factor": 2.0,
            "growth": "rerotate",
            "rerotations": 3,
            "plan_max_length": 128,
        }
        assert "starts at factor 1, grows to factor 1.25 beyond 64 tokens, step by step up to factor 2" in reason
        assert answer["usage"]["completion_tokens"] == 40

    def test_a_request_that_is_prefilled_again_says_so_by_no_rerotations(self, client: httpx.Client) -> None:
        body = {"prompt": "x" * 60, "max_tokens": 10, "rope": {"growth": "reprefill"}}
        rope = client.post("/generate", json=body).json()["rope"]
        assert (rope["growth"], rope["factor"], rope["rerotations"]) == ("reprefill", 1.25, 0)

    def test_growth_stop_ends_at_the_plan(self, client: httpx.Client) -> None:
        answer = client.post("/generate", json={"prompt": "x" * 60, "rope": {"growth": "stop"}}).json()
        assert (answer["finish_reason"], answer["usage"]["total_tokens"]) == ("length", 64)

    def test_a_cached_prefix_is_told_in_the_usage_of_every_route(self) -> None:
        with fake_server(prefix_caching=True) as server:
            body = {"prompt": PROMPT, "max_tokens": 2}
            for cached in (0, 15):  # of 16 tokens; one at least is computed
                for route in ("/generate", "/v1/completions"):
                    if route == "/generate" or cached:
                        usage = server.client.post(route, json=body).json()["usage"]
                        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
            server.wait_until_idle()

    def test_a_prefix_from_another_plan_is_reused_on_request_only(self) -> None:
        with fake_server(prefix_caching=True) as server:
            server.client.post("/generate", json={"prompt": "x" * 40, "max_tokens": 2})
            answers = [
                server.client.post("/generate", json={"prompt": "x" * 80, "max_tokens": 2, "rope": rope}).json()
                for rope in ({"prefix_reuse": "rerotate"}, {"factor": 2, "prefix_reuse": "same-plan"})
            ]
            server.wait_until_idle()
        told = [(a["usage"]["prompt_tokens_details"]["cached_tokens"], a["rope"]) for a in answers]
        assert [(cached, rope["other_plan_prefix_tokens"], rope["rerotations"]) for cached, rope in told] == [
            (40, 40, 0),
            (0, 0, 0),
        ]
