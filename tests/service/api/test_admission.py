"""What an admitted request does with its fields, and which requests are refused before they cost anything."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_patches.loading.generation import GenerationDefaults
from service.api.admission import check_text_length
from service.errors import ContextLengthError
from tests.fakes import expected_output
from tests.serving import FakeServer, error_of, fake_server, read_stream, wait_until

PROMPT = "The quick brown fox"
OUTPUT = expected_output(list(PROMPT.encode()), 40)
TEXT = bytes(OUTPUT).decode()


def generate(client: httpx.Client, **body: object) -> dict[str, object]:
    response = client.post("/generate", json={"prompt": PROMPT, "max_tokens": 40} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, object] = response.json()
    return answer


def test_text_and_its_token_ids_are_the_same_prompt(client: httpx.Client) -> None:
    by_ids = generate(client, prompt=list(PROMPT.encode()))
    assert (by_ids["text"], by_ids["token_ids"]) == (TEXT, OUTPUT)
    assert generate(client)["text"] == TEXT


def test_max_tokens_ends_the_text_with_length(client: httpx.Client) -> None:
    answer = generate(client, max_tokens=1)
    assert (answer["token_ids"], answer["finish_reason"]) == (OUTPUT[:1], "length")


@pytest.mark.parametrize(("growth", "end"), [("stop", 64), ("rerotate", 256), ("reprefill", 256), (None, 256)])
def test_without_max_tokens_the_last_plan_ends_the_text(client: httpx.Client, growth: str | None, end: int) -> None:
    answer = client.post("/generate", json={"prompt": PROMPT, "rope": {"growth": growth}}).json()
    assert (answer["usage"]["total_tokens"], answer["finish_reason"]) == (end, "length")
    rope = answer["rope"]
    assert (rope["mode"], rope["growth"], rope["prefix_reuse"]) == ("dynamic", growth or "rerotate", "same-plan")


@pytest.mark.parametrize("at", [1, 7, 39])
def test_an_end_token_ends_the_text_with_stop_and_is_not_in_it(at: int) -> None:
    end = OUTPUT[at]
    length = OUTPUT.index(end) + 1
    with fake_server(end_tokens=[end]) as server:
        answer = generate(server.client)
        assert (answer["token_ids"], answer["finish_reason"]) == (OUTPUT[:length], "stop")
        assert answer["text"] == TEXT[: length - 1]
        ignoring = generate(server.client, ignore_eos=True)
        assert (ignoring["token_ids"], ignoring["finish_reason"]) == (OUTPUT, "length")
        later = generate(server.client, min_tokens=length)
        assert isinstance(later["token_ids"], list)
        assert len(later["token_ids"]) > length - 1
        assert end not in later["token_ids"][: length - 1]
        assert later["token_ids"][length - 1] != end


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        pytest.param(TEXT[5:8], TEXT[:5], id="one string over three tokens"),
        pytest.param([TEXT[20:24], TEXT[10]], TEXT[: TEXT.index(TEXT[10])], id="the first of two to appear"),
        pytest.param([TEXT[39]], TEXT[: TEXT.index(TEXT[39])], id="on the last token"),
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_in_it(client: httpx.Client, stop: str | list[str], kept: str) -> None:
    answer = generate(client, stop=stop)
    assert (answer["text"], answer["finish_reason"]) == (kept, "stop")
    stream = read_stream(client, "/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "stop": stop})
    assert (stream.text, stream.data[-1]["choices"][0]["finish_reason"]) == (kept, "stop")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_text_held_back_for_a_stop_string_that_does_not_come_is_sent_at_the_end(
    client: httpx.Client, path: str
) -> None:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": PROMPT}
    whole = client.post(path, json=prompt | {"max_tokens": 10}).json()
    choice = whole["choices"][0] if "choices" in whole else whole
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    stream = read_stream(client, path, prompt | {"max_tokens": 10, "stop": text[-1] + "\n"})
    assert stream.text == text


def test_a_seed_repeats_a_sampled_text_and_another_seed_does_not(client: httpx.Client) -> None:
    first, again, other = (generate(client, temperature=2, seed=seed)["token_ids"] for seed in (5, 5, 6))
    assert first == again != other


def test_a_requests_own_values_win_over_the_models_defaults() -> None:
    greedy_by_top_k = GenerationDefaults(frozenset(), temperature=2.0, top_k=1)
    with fake_server(generation=greedy_by_top_k) as server:
        assert generate(server.client)["token_ids"] == OUTPUT
        assert generate(server.client, top_k=0, seed=1)["token_ids"] != OUTPUT
        assert generate(server.client, top_k=0, temperature=0)["token_ids"] == OUTPUT
        assert generate(server.client, top_k=0, top_p=0.01)["token_ids"] == OUTPUT
        assert generate(server.client, top_k=0, min_p=1)["token_ids"] == OUTPUT


def test_a_model_without_defaults_samples_at_temperature_1() -> None:
    with fake_server(generation=GenerationDefaults(frozenset())) as server:
        default = [generate(server.client, seed=seed)["token_ids"] for seed in range(5)]
        asked = [generate(server.client, seed=seed, temperature=1)["token_ids"] for seed in range(5)]
        assert default == asked
        assert any(tokens != OUTPUT for tokens in default)


@pytest.mark.parametrize("reuse", ["same-plan", "rerotate"])
def test_a_wish_for_reuse_of_prefixes_is_granted(client: httpx.Client, reuse: str) -> None:
    rope = generate(client, rope={"prefix_reuse": reuse})["rope"]
    assert isinstance(rope, dict)
    assert rope["prefix_reuse"] == reuse


def test_a_wish_for_a_plan_is_granted(client: httpx.Client) -> None:
    rope = generate(client, rope={"scheme": "linear", "mode": "static", "factor": 2, "growth": "stop"})["rope"]
    assert isinstance(rope, dict)
    assert (rope["scheme"], rope["mode"], rope["factor"], rope["plan_max_length"]) == ("linear", "static", 2.0, 128)


@pytest.mark.parametrize(
    ("rope", "param", "said"),
    [
        ({"scheme": "magic"}, "rope.scheme", ["'magic'", "yarn"]),
        ({"factor": 7}, "rope.factor", ["7", "1.25, 1.5, 2"]),
        ({"mode": "native", "factor": 2}, "rope.factor", ["native", "2"]),
    ],
)
def test_a_wish_that_cannot_be_granted_is_refused_with_what_can(
    client: httpx.Client, rope: dict[str, object], param: str, said: list[str]
) -> None:
    response = client.post("/generate", json={"prompt": PROMPT, "rope": rope})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, "rope_not_available")
    assert all(part in error["message"] for part in said)


class TestLengths:
    """Maximum length 256."""

    @pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_above_the_maximum_is_refused_with_both_numbers(
        self, client: httpx.Client, path: str, stream: bool
    ) -> None:
        # The chat template adds two tokens.
        messages = [{"role": "user", "content": "x" * 298}]
        prompt = {"messages": messages} if "chat" in path else {"prompt": "x" * 300}
        response = client.post(path, json=prompt | {"stream": stream})
        error = error_of(response)
        assert response.status_code == 400
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert "300" in error["message"]
        assert "256" in error["message"]

    @pytest.mark.parametrize(("prompt", "status"), [(255, 200), (256, 400)])
    def test_the_longest_prompt_leaves_room_for_one_token(self, client: httpx.Client, prompt: int, status: int) -> None:
        response = client.post("/generate", json={"prompt": [40] * prompt})
        assert response.status_code == status
        if status == 200:
            assert response.json()["usage"]["completion_tokens"] == 1

    @pytest.mark.parametrize(("max_tokens", "status"), [(156, 200), (157, 400)])
    def test_an_explicit_max_tokens_must_fit_beside_the_prompt(
        self, client: httpx.Client, max_tokens: int, status: int
    ) -> None:
        response = client.post("/generate", json={"prompt": [40] * 100, "max_tokens": max_tokens})
        assert response.status_code == status
        if status == 400:
            error = error_of(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
            assert all(number in error["message"] for number in ("100", "157", "257", "256"))

    def test_min_tokens_above_what_can_be_generated_is_refused(self, client: httpx.Client) -> None:
        error = error_of(client.post("/generate", json={"prompt": "a", "max_tokens": 3, "min_tokens": 4}))
        assert error["param"] == "min_tokens"
        assert "is 4; at most 3" in error["message"]


def test_a_token_id_beyond_the_vocabulary_is_refused_with_the_limit(client: httpx.Client) -> None:
    assert client.post("/generate", json={"prompt": [5, 127], "max_tokens": 1}).status_code == 200
    error = error_of(client.post("/generate", json={"prompt": [5, 128], "max_tokens": 1}))
    assert error["param"] == "prompt"
    assert "128" in error["message"]


def test_a_text_without_tokens_is_refused(client: httpx.Client) -> None:
    error = error_of(client.post("/generate", json={"prompt": "\u00e9"}))
    assert (error["param"], error["message"]) == ("prompt", "prompt: the text has no tokens")


def test_a_full_queue_answers_429_with_retry_after_and_takes_requests_again_later() -> None:
    with fake_server(max_running=1, max_queued=2) as server, server.new_client() as client:
        with server.gate.closed():
            streams = [start_stream(server, client) for _ in range(3)]
            wait_until(lambda: server.num_queued == 2, "one runs and two wait")
            refused = client.post("/generate", json={"prompt": "d", "max_tokens": 1})
            error = error_of(refused)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "the limit is 2" in error["message"]
            # No work is spent on it: what is wrong with a prompt shows only once it is looked at.
            assert client.post("/generate", json={"prompt": [500]}).status_code == 429
        for stream in streams:
            assert stream.read()
            stream.close()
        assert client.post("/generate", json={"prompt": "d", "max_tokens": 1}).status_code == 200


def start_stream(server: FakeServer, client: httpx.Client) -> httpx.Response:
    """Begin a stream; the request is admitted when this returns, whether or not it runs."""
    request = client.build_request("POST", "/generate", json={"prompt": "abc", "max_tokens": 2, "stream": True})
    response = client.send(request, stream=True)
    assert response.status_code == 200
    server.gate.wait_until_reached()
    return response


def test_when_too_many_prompt_tokens_wait_the_next_request_is_refused_before_it_is_looked_at() -> None:
    with fake_server(max_running=1, max_queued_tokens=6) as server, server.new_client() as client:
        traffic, now = server.app.state.server.traffic, 1000.0
        traffic._clock = lambda: now
        assert client.post("/generate", json={"prompt": "abc", "max_tokens": 1}).status_code == 200
        now += 30
        with server.gate.closed():
            streams = [start_stream(server, client) for _ in range(3)]  # one runs; 3 + 3 tokens wait
            refused = client.post("/generate", json={"prompt": [500]})
            error = error_of(refused)
            assert (refused.status_code, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
            assert error["message"] == "6 prompt tokens are waiting; the limit is 6"
            assert refused.headers["retry-after"] == "10"  # 3 tokens in 30 seconds, and one is too many
        for stream in streams:
            stream.read()
            stream.close()
        assert client.post("/generate", json={"prompt": "x" * 100, "max_tokens": 1}).status_code == 200
        assert server.samples()["ropewalk_request_refused_total{code=queue_full}"] == 1


def test_a_key_has_only_so_many_requests_under_way_and_others_are_not_disturbed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a\nb\n")
    with fake_server(api_key_file=file, max_requests_per_key=2) as server, server.new_client() as client:
        client.headers["Authorization"] = "Bearer a"
        with server.gate.closed():
            streams = [start_stream(server, client) for _ in range(2)]
            refused = client.post("/generate", json={"prompt": [500]})
            error = error_of(refused)
            assert (refused.status_code, error["code"], error["type"]) == (429, "too_many_requests", "rate_limit_error")
            assert error["message"] == "2 requests with this key are under way; the limit is 2"
            assert int(refused.headers["retry-after"]) >= 1
            client.headers["Authorization"] = "Bearer b"
            streams.append(start_stream(server, client))
        for stream in streams:
            stream.read()
            stream.close()
        client.headers["Authorization"] = "Bearer a"
        assert client.post("/generate", json={"prompt": "d", "max_tokens": 1}).status_code == 200
        assert server.samples()["ropewalk_request_refused_total{code=too_many_requests}"] == 1


def test_the_limits_are_looked_at_again_when_a_prompt_has_been_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests may be tokenised at a time: those that find no room afterwards are refused too."""
    with fake_server(api_key="k", max_requests_per_key=1) as server:
        headers = {"Authorization": "Bearer k"}
        entered, go_on = threading.Barrier(3), threading.Event()

        async def slowly(*_: Any, **__: Any) -> list[int]:
            await asyncio.to_thread(entered.wait, 60)
            await asyncio.to_thread(go_on.wait, 60)
            return [5]

        monkeypatch.setattr("service.api.generating.tokenize", slowly)
        answers: list[int] = []

        def ask() -> None:
            with server.new_client(headers=headers) as client:
                answers.append(client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code)

        with server.gate.closed():
            askers = [threading.Thread(target=ask) for _ in range(2)]
            for asker in askers:
                asker.start()
            entered.wait(60)
            go_on.set()
            wait_until(lambda: len(answers) == 1, "one of them is refused")
        for asker in askers:
            asker.join(60)
        assert answers == [429, 200]


@pytest.mark.parametrize(("length", "refused"), [(255 * 11 + 10, False), (256 * 11, True)])
def test_a_text_whose_bytes_show_that_it_cannot_fit_is_refused_before_it_is_tokenised(
    length: int, refused: bool
) -> None:
    if not refused:
        check_text_length("a" * length, longest_token=11, max_length=256)
        return
    with pytest.raises(ContextLengthError, match="at least 256 tokens; the maximum length is 256"):
        check_text_length("a" * length, longest_token=11, max_length=256)
