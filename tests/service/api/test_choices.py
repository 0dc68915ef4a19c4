"""Several choices of one request: n, prompts in a batch, and what ends all of them or one of them."""

import asyncio
import re
import threading
from collections import Counter
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.fakes import expected_output
from tests.service.api.test_respond import post_and_vanish
from tests.serving import MODEL, EventStream, FakeServer, error_of, fake_server, read_stream, wait_until

BOTH = ("/v1/completions", "/v1/chat/completions")
PROMPT = "Once upon a time"
HOT = {"temperature": 2.0, "top_p": 1.0}


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in path else {"prompt": PROMPT}
    return prompt | {"max_tokens": 12} | fields


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def texts(client: httpx.Client, path: str, **fields: Any) -> list[str]:
    response = client.post(path, json=body(path, **fields))
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [text_of(choice) for choice in choices]


def streamed(stream: EventStream) -> dict[int, str]:
    """The text of each choice of a stream."""
    pieces: dict[int, str] = {}
    for event in stream.data:
        for choice in event["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            pieces[choice["index"]] = pieces.get(choice["index"], "") + piece
    return pieces


def ends(server: FakeServer) -> Counter[str]:
    """How many sequences ended, by reason."""
    pattern = re.compile(r"ropewalk_request_success_total\{finished_reason=(\w+)\}")
    return Counter({match[1]: int(value) for name, value in server.samples().items() if (match := pattern.match(name))})


class TestTexts:
    @pytest.mark.parametrize("path", BOTH)
    def test_greedy_choices_are_equal(self, client: httpx.Client, path: str) -> None:
        [alone] = texts(client, path)
        assert texts(client, path, n=3) == [alone] * 3

    @pytest.mark.parametrize("path", BOTH)
    def test_sampled_choices_differ_with_and_without_a_seed(self, client: httpx.Client, path: str) -> None:
        for seed in (None, 7):
            assert len(set(texts(client, path, n=5, seed=seed, **HOT))) == 5

    @pytest.mark.parametrize("path", BOTH)
    def test_with_a_seed_each_choice_is_what_the_seed_plus_its_number_gives_alone(
        self, client: httpx.Client, path: str
    ) -> None:
        apart = [texts(client, path, seed=40 + number, **HOT)[0] for number in range(3)]
        assert texts(client, path, n=3, seed=40, **HOT) == apart

    def test_the_largest_seed_has_a_next_one(self, client: httpx.Client) -> None:
        for seed in (2**63 - 1, -(2**63), -1):
            assert len(set(texts(client, "/v1/completions", n=3, seed=seed, **HOT))) == 3

    @pytest.mark.parametrize("path", BOTH)
    def test_best_of_and_n_of_one_are_the_usual_answer(self, client: httpx.Client, path: str) -> None:
        fields = {} if "chat" in path else {"best_of": 1}
        answer = client.post(path, json=body(path, n=1, **fields)).json()
        assert "rope" not in answer["choices"][0]
        assert texts(client, path, n=None) == [text_of(answer["choices"][0])]

    @pytest.mark.parametrize("path", BOTH)
    def test_each_of_several_choices_tells_its_plan(self, client: httpx.Client, path: str) -> None:
        answer = client.post(path, json=body(path, n=2)).json()
        assert [choice["rope"] for choice in answer["choices"]] == [answer["rope"]] * 2
        assert answer["rope"]["mode"] == "native"

    def test_log_probabilities_come_with_each_choice(self, client: httpx.Client) -> None:
        answer = client.post("/v1/completions", json=body("/v1/completions", n=2, seed=1, logprobs=0, **HOT)).json()
        for choice in answer["choices"]:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert answer["choices"][0]["logprobs"] != answer["choices"][1]["logprobs"]


class TestBatches:
    TEXTS = ("Once", "upon a time", "lived")

    @pytest.mark.parametrize("as_tokens", [False, True])
    def test_texts_or_token_ids_are_answered_prompt_by_prompt(self, client: httpx.Client, as_tokens: bool) -> None:
        prompts = [[*text.encode()] if as_tokens else text for text in self.TEXTS]
        answer = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 6, "n": 2}).json()
        expected = [bytes(expected_output([*text.encode()], 6)).decode() for text in self.TEXTS for _ in range(2)]
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))

    def test_texts_and_token_ids_can_be_mixed(self, client: httpx.Client) -> None:
        mixed = client.post("/v1/completions", json={"prompt": ["ab", [97, 98], "a"], "max_tokens": 4}).json()
        first, second, third = (choice["text"] for choice in mixed["choices"])
        assert first == second != third

    def test_a_list_of_one_prompt_is_that_prompt(self, client: httpx.Client) -> None:
        alone = client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4}).json()
        for prompt in (["ab"], [[97, 98]]):
            listed = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4}).json()
            assert listed["choices"] == alone["choices"]

    def test_the_seeds_of_the_prompts_do_not_differ(self, client: httpx.Client) -> None:
        fields = {"prompt": ["same", "same"], "n": 2, "seed": 3, "max_tokens": 8, **HOT}
        first, second, *again = (
            choice["text"] for choice in client.post("/v1/completions", json=fields).json()["choices"]
        )
        assert [first, second] == again
        assert first != second

    def test_each_prompt_gets_a_plan_of_its_own(self, client: httpx.Client) -> None:
        prompt = ["x" * 10, "x" * 100, "x" * 60]
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20}).json()
        ropes = [choice["rope"] for choice in answer["choices"]]
        assert [(rope["mode"], rope["factor"]) for rope in ropes] == [("native", 1), ("static", 2), ("dynamic", 1.25)]
        assert answer["rope"] == ropes[0]

    @pytest.mark.parametrize("bad", [[200], "x" * 300, ""])
    def test_one_bad_prompt_refuses_the_whole_request(self, server: FakeServer, bad: Any) -> None:
        before = ends(server)
        response = server.client.post("/v1/completions", json={"prompt": ["a", bad, "b"], "max_tokens": 2})
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
        assert ends(server) == before


class TestUsage:
    def test_a_prompt_counts_once_however_many_choices_follow(self, client: httpx.Client) -> None:
        fields = {"prompt": ["abc", "defgh"], "n": 3, "max_tokens": 4}
        usage = client.post("/v1/completions", json=fields).json()["usage"]
        details = {"cached_tokens": 0}
        assert usage == {
            "prompt_tokens": 8,
            "completion_tokens": 24,
            "total_tokens": 32,
            "prompt_tokens_details": details,
        }
        options = {"stream_options": {"include_usage": True}}
        last = read_stream(client, "/v1/completions", fields | options).data[-1]
        assert (last["choices"], last["usage"]) == ([], usage)

    @pytest.mark.parametrize("path", BOTH)
    def test_a_stream_has_one_chunk_of_usage_after_all_ends(self, client: httpx.Client, path: str) -> None:
        stream = read_stream(client, path, body(path, n=3, stream_options={"include_usage": True}))
        *chunks, last = stream.data
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 36)
        assert all("usage" not in chunk for chunk in chunks)
        assert stream.done


class TestStreams:
    @pytest.mark.parametrize("path", BOTH)
    def test_choices_come_side_by_side_and_each_ends_once(self, client: httpx.Client, path: str) -> None:
        whole = texts(client, path, n=3, seed=11, **HOT)
        stream = read_stream(client, path, body(path, n=3, seed=11, **HOT))
        assert streamed(stream) == dict(enumerate(whole))
        order = [event["choices"][0]["index"] for event in stream.data]
        assert order != sorted(order)
        finished = [choice for event in stream.data for choice in event["choices"] if choice["finish_reason"]]
        assert sorted(choice["index"] for choice in finished) == [0, 1, 2]
        assert {choice["finish_reason"] for choice in finished} == {"length"}
        ropes = [event["rope"]["mode"] for event in stream.data if "rope" in event]
        assert ropes == ["native"] * 3
        assert len({event["id"] for event in stream.data}) == 1

    def test_every_chat_choice_begins_with_the_role(self, client: httpx.Client) -> None:
        stream = read_stream(client, "/v1/chat/completions", body("/v1/chat/completions", n=3))
        for number, event in enumerate(stream.data[:3]):
            [choice] = event["choices"]
            assert (choice["index"], choice["delta"]) == (number, {"role": "assistant", "content": ""})

    def test_choices_of_different_lengths_end_when_they_do(self, server: FakeServer) -> None:
        server.writes("short", "rather a longer one")
        try:
            stream = read_stream(server.client, "/v1/completions", body("/v1/completions", n=2, max_tokens=30))
        finally:
            server.parts.runner.script = lambda _: None
        assert streamed(stream) == {0: "short", 1: "rather a longer one"}
        ended = [c["index"] for event in stream.data for c in event["choices"] if c["finish_reason"] == "stop"]
        assert ended == [0, 1]

    def test_openais_client_reads_several_choices(self, server: FakeServer) -> None:
        with server.openai() as openai:
            whole = openai.completions.create(model=MODEL, prompt=["ab", "cd"], n=2, max_tokens=5)
            assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
            pieces = Counter[int]()
            read: dict[int, str] = {}
            for chunk in openai.completions.create(model=MODEL, prompt=["ab", "cd"], n=2, max_tokens=5, stream=True):
                for choice in chunk.choices:
                    pieces[choice.index] += 1
                    read[choice.index] = read.get(choice.index, "") + choice.text
            assert [read[index] for index in range(4)] == [choice.text for choice in whole.choices]
            chat = _chat(openai)
            assert chat == [chat[0]] * 3


def _chat(openai: OpenAI) -> list[str | None]:
    answer = openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], n=3, max_tokens=5
    )
    return [choice.message.content for choice in answer.choices]


class TestRequestId:
    @pytest.mark.parametrize("path", BOTH)
    def test_the_answer_has_one_id_and_each_choice_its_own_in_the_log(
        self, client: httpx.Client, caplog: pytest.LogCaptureFixture, path: str
    ) -> None:
        caplog.set_level("INFO", "service.engine.engine")
        response = client.post(path, json=body(path, n=2), headers={"X-Request-Id": "my-own"})
        kind = "chatcmpl" if "chat" in path else "cmpl"
        assert response.headers["x-request-id"] == "my-own"
        assert response.json()["id"] == f"{kind}-my-own"

        def ended() -> list[str]:
            return [record.fields["request_id"] for record in caplog.records if hasattr(record, "fields")]

        wait_until(lambda: len(ended()) == 2, "both ends are logged")
        assert sorted(ended()) == [f"{kind}-my-own-0", f"{kind}-my-own-1"]


class TestQueue:
    """One runs, two may wait."""

    def test_a_request_finds_room_for_all_its_choices_or_is_refused_whole(self) -> None:
        with fake_server(max_running=1, max_queued=2) as server, server.new_client() as client:
            with server.gate.closed(), client.stream("POST", "/generate", json=body("", stream=True)) as running:
                server.gate.wait_until_reached()
                refused = client.post("/v1/completions", json=body("", n=3))
                error = error_of(refused)
                assert (refused.status_code, error["code"]) == (429, "queue_full")
                assert error["message"] == "0 requests are waiting and 3 more would; the limit is 2"
                assert int(refused.headers["retry-after"]) >= 1
                assert server.num_queued == 0
                batch = client.post("/v1/completions", json=body("", prompt=["a", "b", "c"]))
                assert batch.status_code == 429
                answers: list[httpx.Response] = []
                fitting = threading.Thread(
                    target=lambda: answers.append(server.client.post("/v1/completions", json=body("", n=2)))
                )
                fitting.start()
                wait_until(lambda: server.num_queued == 2, "both choices wait")
                full = client.post("/generate", json=body(""))
                assert "2 requests are waiting; the limit is 2" in error_of(full)["message"]
                server.gate.open()
                running.read()
            fitting.join(60)
            assert len(answers[0].json()["choices"]) == 2
            server.wait_until_idle()
            assert +ends(server) == {"length": 3}

    def test_more_than_could_ever_be_queued_is_a_400(self) -> None:
        with fake_server(max_running=1, max_queued=2) as server:
            assert server.client.post("/v1/completions", json=body("", n=3)).status_code == 200
            response = server.client.post("/v1/completions", json=body("", n=4))
            error = error_of(response)
            assert (response.status_code, error["code"], error["param"]) == (400, "max_choices_exceeded", "n")
            assert error["message"] == "n: 4 choices; this server allows 3 (max_running + max_queued)"

    def test_more_choices_than_run_at_a_time_come_one_after_the_other(self) -> None:
        with fake_server(max_running=2) as server:
            assert len(texts(server.client, "/v1/completions", n=7)) == 7
            server.wait_until_idle()


class TestEnds:
    @pytest.mark.parametrize("path", BOTH)
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_goes_away_ends_every_choice(self, server: FakeServer, path: str, stream: bool) -> None:
        before = ends(server)
        content = body(path, n=3, max_tokens=40, stream=stream)
        other = {"prompt": "a", "max_tokens": 1, "stream": True}
        with server.gate.closed(), server.client.stream("POST", "/generate", json=other) as disturbing:
            server.gate.wait_until_reached()
            vanishing = asyncio.run_coroutine_threadsafe(post_and_vanish(server, path, content), server.loop)
            wait_until(lambda: server.inbox_size > 3, "the request and its cancellations reach the engine")
            server.gate.open()
            disturbing.read()
        vanishing.result(60)
        server.wait_until_idle()
        assert ends(server) - before == {"cancelled": 3, "length": 1}

    def test_choices_that_have_ended_are_left_alone_when_the_client_goes(self, server: FakeServer) -> None:
        before = ends(server)
        server.writes("", "x" * 40)
        try:
            with server.new_client() as client, server.gate.closed():
                content = body("", n=2, max_tokens=30, stream=True)
                with client.stream("POST", "/v1/completions", json=content) as response:
                    server.gate.wait_until_reached()
                    server.gate.pass_one_step()
                    server.gate.pass_one_step()
                    lines = response.iter_lines()
                    wait_until(lambda: '"finish_reason":"stop"' in next(lines), "the first choice has ended")
                wait_until(lambda: server.inbox_size > 0, "the cancellation reaches the engine")
                assert server.inbox_size == 1
            server.wait_until_idle()
        finally:
            server.parts.runner.script = lambda _: None
        assert ends(server) - before == {"stop": 1, "cancelled": 1}

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_deadline_ends_all_and_is_counted_once(self, server: FakeServer, stream: bool) -> None:
        name = "ropewalk_request_refused_total{code=deadline_exceeded}"
        before, counted = ends(server), server.samples().get(name, 0)
        answers: list[httpx.Response] = []
        content = body("", n=3, max_tokens=40, timeout=0.05, stream=stream)
        asking = threading.Thread(
            target=lambda: answers.append(server.client.post("/v1/completions", json=content)), daemon=True
        )
        with server.gate.closed():
            asking.start()
            server.gate.wait_until_reached()
            wait_until(lambda: server.inbox_size >= 3, "the cancellations reach the engine")
        asking.join(60)
        [answer] = answers
        if stream:
            assert answer.text.count('"deadline_exceeded"') == 1
            assert answer.text.rstrip().endswith("data: [DONE]")
        else:
            assert (answer.status_code, error_of(answer)["code"]) == (408, "deadline_exceeded")
        server.wait_until_idle()
        assert ends(server) - before == {"cancelled": 3}
        assert server.samples()[name] == counted + 1

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_error_in_one_choice_ends_the_request_once_and_the_others_with_it(
        self, server: FakeServer, stream: bool
    ) -> None:
        before, runner = ends(server), server.parts.runner

        def fail_second(number: int, step: Any) -> None:
            del number
            if any(sequence.request_id.endswith("-1") and sequence.output for sequence in step):
                raise ValueError("a secret of the engine")

        server.parts.scheduler._max_batch_tokens, usual = 8, server.parts.scheduler._max_batch_tokens
        runner.before_step, gate = fail_second, runner.before_step
        try:
            # Long prompts under a small budget: when the second choice fails, the third is not in its step.
            content = body("", prompt=["ab", "cd", "x" * 40], max_tokens=20, stream=stream)
            response = server.client.post("/v1/completions", json=content)
        finally:
            runner.before_step, server.parts.scheduler._max_batch_tokens = gate, usual
        assert "secret" not in response.text
        if stream:
            events = [line for line in response.text.splitlines() if line.startswith("data: {")]
            assert [number for number, event in enumerate(events) if '"error"' in event] == [len(events) - 1]
            assert '"generation_failed"' in events[-1]
        else:
            assert (response.status_code, error_of(response)["code"]) == (500, "generation_failed")
        server.wait_until_idle()
        ended = ends(server) - before
        assert ended.total() == 3
        assert ended["error"] >= 1
        assert server.client.post("/v1/completions", json=body("", n=3)).status_code == 200
