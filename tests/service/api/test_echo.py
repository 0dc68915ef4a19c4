"""Prompts that come back: echo of completions, and log-probabilities of a prompt's tokens on both routes."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes import VOCABULARY, expected_output, next_token
from tests.serving import MODEL, FakeServer, error_of, fake_server, read_stream

LIKELY = 10 - math.log(math.exp(10) + VOCABULARY - 1)
OTHERS = LIKELY - 10


def prompt_of(length: int, first: str = "F") -> str:
    """A text of which the fake model expects about half, in no regular way."""
    prompt = [*first.encode()]
    while len(prompt) < length:
        expected = next_token(prompt)
        prompt.append(expected if sum(prompt) % 2 else 65 + len(prompt) % 20)
    return bytes(prompt).decode()


PROMPT = prompt_of(40)


def expected_logprobs(text: str, *, factor: float = 1.0) -> list[float | None]:
    tokens = [*text.encode()]
    expected = (next_token(tokens[:place], [factor] * place) for place in range(len(tokens)))
    pairs = enumerate(zip(tokens, expected, strict=True))
    return [None if not place else LIKELY if token == next_ else OTHERS for place, (token, next_) in pairs]


def continued(prompt: str, count: int) -> str:
    return bytes(expected_output([*prompt.encode()], count)).decode()


def choices(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = client.post("/v1/completions", json={"echo": True, "max_tokens": 5} | fields)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def streamed_choices(client: httpx.Client, **fields: Any) -> dict[int, dict[str, Any]]:
    """A stream's choices, put together again."""
    found: dict[int, dict[str, Any]] = {}
    for event in read_stream(client, "/v1/completions", {"echo": True, "max_tokens": 5} | fields).data:
        for part in event["choices"]:
            choice = found.setdefault(part["index"], {"text": "", "logprobs": None})
            choice["text"] += part["text"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values)
    return found


def approx(values: list[float | None]) -> list[Any]:
    return [value if value is None else pytest.approx(value, abs=1e-5) for value in values]


def assert_complete(choice: dict[str, Any], prompt: str, tokens: int = 5, factor: float = 1.0) -> None:
    """A choice with echo and log-probabilities is as if all of it had been a prompt."""
    logprobs, text = choice["logprobs"], choice["text"]
    assert len(text) == len(prompt) + tokens
    assert logprobs["tokens"] == [*text]
    assert logprobs["text_offset"] == [*range(len(text))]
    assert logprobs["token_logprobs"] == approx(expected_logprobs(text, factor=factor))
    assert logprobs["top_logprobs"][0] is None
    assert all(token in top for token, top in zip(text[1:], logprobs["top_logprobs"][1:], strict=True))


class TestEcho:
    def test_the_text_begins_with_the_prompt(self, client: httpx.Client) -> None:
        for prompt in (PROMPT, [*PROMPT.encode()]):
            [choice] = choices(client, prompt=prompt)
            assert (choice["text"], choice["logprobs"]) == (PROMPT + continued(PROMPT, 5), None)
            assert streamed_choices(client, prompt=prompt)[0]["text"] == choice["text"]

    def test_the_prompt_is_a_streams_first_event(self, client: httpx.Client) -> None:
        first = read_stream(client, "/v1/completions", {"prompt": PROMPT, "echo": True, "max_tokens": 3}).data[0]
        assert first["choices"] == [{"index": 0, "text": PROMPT, "logprobs": None, "finish_reason": None}]

    def test_false_is_none(self, client: httpx.Client) -> None:
        assert choices(client, prompt=PROMPT, echo=False)[0]["text"] == continued(PROMPT, 5)

    def test_stop_strings_are_looked_for_behind_it(self, client: httpx.Client) -> None:
        text = continued(PROMPT, 5)
        [choice] = choices(client, prompt=PROMPT, stop=[PROMPT[3:6], text[2:4]])
        assert (choice["text"], choice["finish_reason"]) == (PROMPT + text[:2], "stop")

    def test_each_choice_begins_with_its_own_prompt(self, client: httpx.Client) -> None:
        prompts = [prompt_of(10, "A"), prompt_of(30, "B")]
        expected = [prompt + continued(prompt, 5) for prompt in prompts for _ in range(2)]
        assert [choice["text"] for choice in choices(client, prompt=prompts, n=2)] == expected
        streamed = streamed_choices(client, prompt=prompts, n=2)
        assert [streamed[index]["text"] for index in range(4)] == expected

    def test_usage_counts_it_as_a_prompt(self, client: httpx.Client) -> None:
        body = {"prompt": PROMPT, "echo": True, "max_tokens": 5}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 5)


class TestEchoWithLogprobs:
    @pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
    @pytest.mark.parametrize("streamed", [False, True])
    def test_prompt_and_text_are_told_as_one(self, client: httpx.Client, length: int, streamed: bool) -> None:
        prompt = prompt_of(length)
        read = streamed_choices if streamed else choices
        assert_complete(read(client, prompt=prompt, logprobs=2)[0], prompt)

    @pytest.mark.parametrize("streamed", [False, True])
    def test_in_every_choice_of_a_batch(self, client: httpx.Client, streamed: bool) -> None:
        prompts = [prompt_of(1, "A"), prompt_of(30, "B"), prompt_of(21, "C")]
        read = streamed_choices if streamed else choices
        found = read(client, prompt=prompts, n=2, logprobs=1)
        for index in range(6):
            assert_complete(found[index], prompts[index // 2])

    def test_without_the_likeliest(self, client: httpx.Client) -> None:
        [choice] = choices(client, prompt=PROMPT, logprobs=0)
        assert_complete(choice, PROMPT)
        assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])

    def test_a_special_token_has_no_text_of_its_own(self, client: httpx.Client) -> None:
        [choice] = choices(client, prompt=[65, 2, 66], logprobs=0)
        assert choice["text"][:2] == "AB"
        assert choice["logprobs"]["tokens"][:3] == ["A", "<user>", "B"]
        assert choice["logprobs"]["text_offset"][:4] == [0, 1, 1, 2]

    def test_openais_client_reads_it(self, server: FakeServer) -> None:
        with server.openai() as openai:
            answer = openai.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        # What evaluation harnesses do: the null of the first token aside, the prompt's log-likelihood is their sum.
        own, expected = logprobs.token_logprobs[1:40], expected_logprobs(PROMPT)[1:]
        assert sum(own) == pytest.approx(sum(value for value in expected if value is not None), abs=1e-3)


class TestPromptLogprobs:
    def tell(self, client: httpx.Client, prompt: str, *, stream: bool, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 4, "prompt_logprobs": 1} | fields
        if not stream:
            answer: dict[str, Any] = client.post("/generate", json=body).json()
            return answer
        *events, last = read_stream(client, "/generate", body).data
        told = [token for event in events for token in event.get("prompt_logprobs", [])]
        assert "prompt_logprobs" not in last
        told_tokens = [token for event in events for token in event["token_ids"]]
        return dict(last) | {"prompt_logprobs": told, "token_ids": told_tokens}

    @pytest.mark.parametrize("length", [1, 2, 16, 17, 50])
    @pytest.mark.parametrize("stream", [False, True])
    def test_each_token_of_the_prompt_is_told(self, client: httpx.Client, length: int, stream: bool) -> None:
        prompt = prompt_of(length)
        answer = self.tell(client, prompt, stream=stream)
        first, *rest = answer["prompt_logprobs"]
        assert first is None
        assert [token["token"] for token in rest] == [*prompt[1:]]
        assert [token["token_id"] for token in rest] == [*prompt[1:].encode()]
        assert [token["logprob"] for token in rest] == approx(expected_logprobs(prompt)[1:])
        for place, token in enumerate(rest, start=1):
            [top] = token["top"]
            assert top["token_id"] == next_token([*prompt[:place].encode()])
        assert answer["token_ids"] == expected_output([*prompt.encode()], 4)
        assert "logprobs" not in answer

    def test_they_come_before_the_text_in_a_stream(self, client: httpx.Client) -> None:
        body = {"prompt": prompt_of(50), "max_tokens": 4, "prompt_logprobs": 0}
        events = read_stream(client, "/generate", body).data[:-1]
        told = [bool(event.get("prompt_logprobs")) for event in events]
        assert told == [True] * 5 + [False] * 4  # none for the first token, then four chunks of at most 16
        assert [bool(event["token_ids"]) for event in events] == [not of_prompt for of_prompt in told]

    def test_both_kinds_side_by_side(self, client: httpx.Client) -> None:
        answer = self.tell(client, PROMPT, stream=False, logprobs=0)
        assert (len(answer["prompt_logprobs"]), len(answer["logprobs"])) == (40, 4)

    def test_they_are_of_the_requests_own_plan(self, client: httpx.Client) -> None:
        prompt = prompt_of(100)
        answer = self.tell(client, prompt, stream=False)
        assert answer["rope"]["factor"] == 2
        told = [token["logprob"] for token in answer["prompt_logprobs"][1:]]
        assert told == approx(expected_logprobs(prompt, factor=2)[1:])

    @pytest.mark.parametrize("stream", [False, True])
    def test_growth_tells_them_once(self, client: httpx.Client, stream: bool) -> None:
        answer = self.tell(client, prompt_of(60), stream=stream, max_tokens=60)
        assert answer["rope"]["rerotations"] > 1
        told = answer["prompt_logprobs"][1:]
        assert [token["logprob"] for token in told] == approx(expected_logprobs(prompt_of(60))[1:])

    def test_the_cache_is_not_asked(self, cached: httpx.Client) -> None:
        for turn in range(2):
            answer = self.tell(cached, PROMPT, stream=False)
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
            told = [token["logprob"] for token in answer["prompt_logprobs"][1:]]
            assert told == approx(expected_logprobs(PROMPT)[1:]), turn
        plain = cached.post("/generate", json={"prompt": PROMPT, "max_tokens": 4}).json()
        assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 39}
        [choice] = choices(cached, prompt=PROMPT, logprobs=1)
        assert_complete(choice, PROMPT)

    @pytest.mark.parametrize("value", [-1, 21, 1.5, True])
    def test_their_number_is_limited(self, client: httpx.Client, value: Any) -> None:
        response = client.post("/generate", json={"prompt": "a", "prompt_logprobs": value})
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt_logprobs")


@pytest.fixture
def cached() -> Iterator[httpx.Client]:
    with fake_server(prefix_caching=True) as server:
        yield server.client
        server.wait_until_idle()
