"""One span for each request, with its stages, under the caller's trace; nothing that a client wrote is in them."""

import logging
import threading
from itertools import pairwise

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, http_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import StatusCode

from tests.service.tracing.recording import Recording, attributes, seconds
from tests.serving import DEADLINE, MODEL, FakeServer, fake_server, read_stream, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
"""Of the example in the W3C's recommendation "Trace Context"."""
CONVENTIONS = {
    value
    for module in (gen_ai_attributes, http_attributes, error_attributes)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}


def generate(server: FakeServer, **fields: object) -> httpx.Response:
    body = {"prompt": "Some words", "max_tokens": 5, "temperature": 0, **fields}
    return server.client.post("/generate", json=body)


def test_a_request_is_described_in_the_words_of_the_conventions(server: FakeServer, recording: Recording) -> None:
    answer = generate(server, max_tokens=7, top_p=0.5).json()
    span = recording.request()
    assert span.name == f"text_completion {MODEL}"
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name == "ropewalk"
    assert attributes(span) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "ropewalk",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": (answer["finish_reason"],),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "http.request.method": "POST",
        "http.route": "/generate",
        "http.response.status_code": 200,
        "ropewalk.rope.scheme": answer["rope"]["scheme"],
        "ropewalk.rope.mode": answer["rope"]["mode"],
        "ropewalk.rope.factor": answer["rope"]["factor"],
        "ropewalk.rope.rerotations": 0,
    }
    own = {name for name in attributes(span) if not name.startswith("ropewalk.")}
    assert own - CONVENTIONS == set()


def test_the_stages_are_those_of_the_answer_s_timing(server: FakeServer, recording: Recording) -> None:
    timing = generate(server).json()["timing"]
    queue, prefill, decode = stages = recording.stages()
    assert [span.name for span in stages] == ["queue", "prefill", "decode"]
    assert all(before.end_time == after.start_time for before, after in pairwise(stages))
    assert seconds(queue) == pytest.approx(timing["queue_seconds"], abs=1e-6)
    assert seconds(prefill) == pytest.approx(timing["prefill_seconds"], abs=1e-6)
    assert seconds(queue) + seconds(prefill) + seconds(decode) == pytest.approx(timing["total_seconds"], abs=1e-6)
    request = recording.request()
    assert request.start_time is not None
    assert request.end_time is not None
    assert request.start_time <= (queue.start_time or 0)
    assert (decode.end_time or 0) <= request.end_time


def test_a_re_rotation_is_a_stage_with_the_factor_reached(server: FakeServer, recording: Recording) -> None:
    answer = generate(server, prompt="x" * 60, max_tokens=20, ignore_eos=True).json()
    assert answer["rope"]["rerotations"] == 1
    (move,) = [span for span in recording.stages() if span.name == "rerotate"]
    assert attributes(move)["ropewalk.rope.factor"] == answer["rope"]["factor"] > 1
    assert attributes(move)["ropewalk.rope.tokens"] == 64  # the native length: all that was cached then
    assert attributes(recording.request())["ropewalk.rope.rerotations"] == 1
    decode = next(span for span in recording.stages() if span.name == "decode")
    assert (decode.start_time or 0) < (move.start_time or 0) <= (move.end_time or 0) < (decode.end_time or 0)


def test_tokens_found_in_the_cache_are_told(server: FakeServer, recording: Recording) -> None:
    generate(server, prompt="y" * 40)
    generate(server, prompt="y" * 40)
    wait_until(lambda: len(recording.requests) == 2, "both have ended")
    cached = [attributes(span)["gen_ai.usage.cache_read.input_tokens"] for span in recording.requests]
    assert cached == [0, 39]  # one token at least is computed


def test_every_choice_has_its_stages_and_a_prompt_counts_once(server: FakeServer, recording: Recording) -> None:
    body = {"model": MODEL, "prompt": ["abc", "defgh"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    told = attributes(recording.request())
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (8, 12)
    assert told["gen_ai.request.choice.count"] == 2
    assert told["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert [len(recording.stages(choice)) for choice in range(4)] == [3, 3, 3, 3]


def test_a_chat_is_one_too(server: FakeServer, recording: Recording) -> None:
    stream = read_stream(
        server.client,
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    )
    span = recording.request()
    assert span.name == f"chat {MODEL}"
    assert attributes(span)["gen_ai.operation.name"] == "chat"
    assert attributes(span)["gen_ai.response.id"] == stream.data[0]["id"]


class TestContext:
    def test_the_caller_s_trace_goes_on(self, server: FakeServer, recording: Recording) -> None:
        server.client.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
        generate(server)
        span = recording.request()
        assert span.context is not None
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        assert {stage.context.trace_id for stage in recording.stages() if stage.context} == {span.context.trace_id}

    @pytest.mark.parametrize("header", ["", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", "x" * 5000])
    def test_without_a_valid_one_there_is_a_new_one(
        self, server: FakeServer, recording: Recording, header: str
    ) -> None:
        server.client.headers["traceparent"] = header
        assert generate(server).status_code == 200
        assert recording.request().parent is None

    def test_what_the_caller_does_not_sample_is_not_recorded(self, server: FakeServer, recording: Recording) -> None:
        server.client.headers["traceparent"] = f"00-{TRACE}-{PARENT}-00"
        assert generate(server).status_code == 200
        del server.client.headers["traceparent"]
        assert generate(server).status_code == 200
        assert recording.request().parent is None
        assert [point.count for point in recording.points("gen_ai.server.request.duration")] == [2]


class TestBadEnds:
    def test_a_refusal_has_a_span_without_stages(self, server: FakeServer, recording: Recording) -> None:
        assert generate(server, max_tokens=-1).status_code == 400
        told = attributes(recording.request())
        assert (told["http.response.status_code"], told["error.type"]) == (400, "400")
        assert recording.request().status.status_code == StatusCode.UNSET  # the client's fault, not the server's
        assert recording.stages() == []

    def test_a_client_that_goes_away_leaves_a_cancelled_request(self, server: FakeServer, recording: Recording) -> None:
        body = {"prompt": "a", "max_tokens": 60, "stream": True}
        with server.gate.closed():
            with server.new_client() as client, client.stream("POST", "/generate", json=body):
                server.gate.wait_until_reached()
            assert recording.requests == []
        told = attributes(recording.request())
        assert told["gen_ai.response.finish_reasons"] == ("cancelled",)
        assert (told["http.response.status_code"], told["error.type"]) == (200, "cancelled")
        assert [stage.name for stage in recording.stages()][:2] == ["queue", "prefill"]

    def test_a_step_that_fails_is_the_server_s_fault(self, server: FakeServer, recording: Recording) -> None:
        server.gate.fault = RuntimeError("no such thing")
        assert generate(server).status_code == 500
        server.gate.fault = None
        told = attributes(recording.request())
        assert (told["error.type"], told["gen_ai.response.finish_reasons"]) == ("generation_failed", ("error",))
        assert recording.request().status.status_code == StatusCode.ERROR
        assert "no such thing" not in recording.everything()

    def test_a_deadline_is_told_from_a_cancellation(self, server: FakeServer, recording: Recording) -> None:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(generate(server, timeout=0.01)), daemon=True)
        with server.gate.closed():
            asking.start()
            server.gate.wait_until_reached()
            wait_until(lambda: server.inbox_size > 0, "the cancellation reaches the engine")
        asking.join(DEADLINE)
        assert [answer.status_code for answer in answers] == [408]
        assert attributes(recording.request())["error.type"] == "deadline_exceeded"
        assert [stage.name for stage in recording.stages()] == ["queue", "prefill", "decode"]


def test_nothing_that_a_client_wrote_is_sent(server: FakeServer, recording: Recording) -> None:
    server.writes("Zebras answer zzz")
    answer = generate(
        server,
        prompt="Yaks ask",
        stop=["quaggas"],
        max_tokens=30,
    )
    assert "Zebras" in answer.json()["text"]
    generate(server, prompt="Yaks ask", rope={"scheme": "aardvark"})
    wait_until(lambda: len(recording.requests) == 2, "both have ended")
    sent = recording.everything()
    assert "text_completion" in sent
    assert [word for word in ("Zebras", "zzz", "Yaks", "quaggas", "aardvark") if word in sent] == []


def test_other_routes_have_no_span(server: FakeServer, recording: Recording) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/generate"):
        server.client.get(path)
    server.client.post("/tokenize", json={"prompt": "a"})
    generate(server)
    assert attributes(recording.request())["http.route"] == "/generate"


def test_who_has_no_key_makes_no_span() -> None:
    recording, prepared = Recording(MODEL), fake_server(api_key="k")
    recording.attach(prepared)
    with prepared as server:
        assert generate(server).status_code == 401
        server.client.headers["Authorization"] = "Bearer k"
        assert generate(server).status_code == 200
        assert attributes(recording.request())["http.response.status_code"] == 200
    assert recording.stops["stop"] == 1  # with the server


class Raising(SpanProcessor):
    """Something that an operator plugged in, and that is broken."""

    def on_end(self, span: ReadableSpan) -> None:
        del span
        raise OSError("the collector is gone")


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_does_not_suffer_from_what_receives_its_span(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    recording, prepared = Recording(MODEL, Raising()), fake_server()
    recording.attach(prepared)
    with caplog.at_level(logging.ERROR), prepared as server:
        answer = generate(server, stream=stream)
        assert answer.status_code == 200
        assert '"finish_reason":"length"' in answer.text.replace(" ", "")
        server.wait_until_idle()
    assert [record.message for record in caplog.records if record.name == "service.tracing.request"] == [
        "a request could not be traced"
    ]
