"""The three routes that are measured: what they are asked, and what a chunk of their answers tells.

Chunks are read as any OpenAI-compatible server may send them: nothing but what is needed here is asked for.
"""

from typing import Any

from pydantic import BaseModel

from service.bench.workload import Prompt
from service.client.calls import StreamCall, json_reader

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}


class Details(BaseModel):
    """What became of a prompt's tokens."""

    cached_tokens: int | None = None


class Usage(BaseModel):
    """Tokens, as the server counts them."""

    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Delta(BaseModel):
    """What a chunk adds to a message."""

    content: str | None = None
    reasoning_content: str | None = None  # as vLLM and SGLang name what a model thinks
    reasoning: str | None = None


class Choice(BaseModel):
    """One answer's part of a chunk."""

    text: str | None = None
    delta: Delta = Delta()
    finish_reason: str | None = None


class Chunk(BaseModel):
    """A chunk of any of the three routes."""

    choices: list[Choice] = []
    usage: Usage | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def brings_output(self) -> bool:
        """Whether it has a part of the answer."""
        return bool(self.text or self.token_ids) or any(
            choice.text or choice.delta.content or choice.delta.reasoning_content or choice.delta.reasoning
            for choice in self.choices
        )

    @property
    def is_finish(self) -> bool:
        """Whether it says that the answer is complete."""
        return self.finish_reason is not None or any(choice.finish_reason is not None for choice in self.choices)


def streamed(
    endpoint: str, prompt: Prompt, max_tokens: int, *, model: str, ignore_eos: bool, include_usage: bool
) -> StreamCall[Chunk]:
    """A greedy, streamed request.

    Args:
        endpoint: a key of `PATHS`.
        prompt: text or token ids; text for a chat.
        max_tokens: to generate.
        model: the name to ask for.
        ignore_eos: generate on past the end; for servers that know the field.
        include_usage: ask for the usage at the end; /generate sends it anyway.
    """
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if ignore_eos:
        body["ignore_eos"] = True
    if include_usage and endpoint != "generate":
        body["stream_options"] = {"include_usage": True}
    # Some servers send no [DONE].
    return StreamCall(PATHS[endpoint], body, json_reader(Chunk), _may_be_last)


def _may_be_last(chunk: Chunk) -> bool:
    return chunk.is_finish or chunk.usage is not None
