"""An OpenAI-compatible server that takes exactly the time that it is told to, on the event loop's clock."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

PAIRS = ("heart", "water")  # words of two tokens


def tokens_of(text: str) -> list[int]:
    """Token ids of a text: one for a word, two for those of `PAIRS`."""
    return [number for word in text.split() for number in ([1, 2] if word in PAIRS else [10 + hash(word) % 100_000])]


class Timed(httpx.AsyncByteStream):
    """A body whose pieces come after a wait each."""

    def __init__(self, pieces: list[tuple[float, bytes]], server: "FakeServer") -> None:
        self._pieces = pieces
        self._server = server

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for wait, piece in self._pieces:
            await asyncio.sleep(wait)
            yield piece

    async def aclose(self) -> None:
        self._server.running -= 1


@dataclass
class FakeServer(httpx.AsyncBaseTransport):
    """Answers with so many tokens, in so much time.

    Attributes:
        first: seconds to the first token.
        between: seconds between tokens.
        tokens_per_chunk: tokens that come in one chunk.
        overhead: tokens that it puts around a text.
        max_running: requests at a time; more are refused.
        key: that it asks for.
        unknown: fields that it refuses.
        has_tokenize: whether it has /tokenize.
        has_usage: whether it counts tokens.
        sends_done: whether its streams end with [DONE].
        ends_after: tokens after which answers end, unless `ignore_eos`.
        fails_at: numbers of generating requests whose stream ends with an error.
        bodies: of generating requests.
        arrivals: when they came.
        most_running: that ran at a time.
    """

    first: float = 0.5
    between: float = 0.1
    tokens_per_chunk: int = 1
    overhead: int = 0
    max_running: int = 1000
    key: str | None = None
    unknown: tuple[str, ...] = ()
    has_tokenize: bool = True
    has_usage: bool = True
    sends_done: bool = True
    ends_after: int = 1000
    fails_at: tuple[int, ...] = ()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    asked: list[str] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return refusal(401, "invalid_api_key", "a valid key is needed")
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "org/served"}, {"id": "other"}]})
        body = json.loads(request.content)
        if path == "/tokenize" and self.has_tokenize:
            tokens = tokens_of(body["prompt"])
            return httpx.Response(200, json={"tokens": tokens, "count": len(tokens), "max_model_len": 9})
        if path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            return self._generate(path, body)
        return refusal(404, "not_found", "no such path")

    def _generate(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if body["model"] != "org/served":
            return refusal(404, "model_not_found", f"{body['model']} is not served")
        if found := [name for name in self.unknown if name in body]:
            return refusal(400, "invalid_value", f"{found[0]} is not a field")
        if self.running >= self.max_running:
            return refusal(429, "queue_full", "the queue is full")
        self.bodies.append(body)
        self.arrivals.append(asyncio.get_running_loop().time())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        stream = Timed(self._pieces(path, body), self)
        return httpx.Response(200, stream=stream, headers={"Content-Type": "text/event-stream"})

    def _pieces(self, path: str, body: dict[str, Any]) -> list[tuple[float, bytes]]:
        number = body["max_tokens"] if body.get("ignore_eos") else min(body["max_tokens"], self.ends_after)
        pieces, wait = [], self.first
        for start in range(0, number, self.tokens_per_chunk):
            count = min(self.tokens_per_chunk, number - start)
            pieces.append((wait, event(chunk(path, "x" * count))))
            wait = self.between * self.tokens_per_chunk
        if len(self.bodies) - 1 in self.fails_at:
            return [*pieces[:-1], (0.0, event({"error": {"message": "it broke", "code": "generation_failed"}}))]
        usage = {"usage": self._usage(body, number)} if self.has_usage else {}
        pieces.append((0.0, event(chunk(path, "", finish_reason="length") | (usage if path == "/generate" else {}))))
        if usage and body.get("stream_options", {}).get("include_usage"):
            pieces.append((0.0, event({"choices": [], **usage})))
        return [*pieces, (0.0, b"data: [DONE]\n\n")] if self.sends_done else pieces

    def _usage(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        prompt = body.get("prompt") or body["messages"][0]["content"]
        length = len(prompt) if isinstance(prompt, list) else len(tokens_of(prompt)) + self.overhead
        details = {"cached_tokens": 3}
        return {"prompt_tokens": length, "completion_tokens": number, "prompt_tokens_details": details}


def chunk(path: str, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    if path == "/generate":
        return {"text": text, "token_ids": [], "finish_reason": finish_reason}
    content = {"delta": {"content": text}} if "chat" in path else {"text": text}
    return {"choices": [{**content, "finish_reason": finish_reason}]}


def event(value: object) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def refusal(status: int, code: str, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": code}})
