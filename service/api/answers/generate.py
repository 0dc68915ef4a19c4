"""The shapes of POST /generate."""

from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from service import core
from service.api.answers.base import AnswerFormat, Ending, Header, usage
from service.api.logprobs import LogprobShapes
from service.api.responses import GenerateChunk, GenerateResponse, TokenLogprob


class GenerateFormat(AnswerFormat):
    """The server's own shape: one choice, with token ids and timing."""

    def __init__(self, shapes: LogprobShapes, *, logprobs: bool, prompt_logprobs: bool) -> None:
        self._shapes = shapes
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def begin(self, header: Header) -> Iterable[BaseModel]:
        if self._prompt_logprobs:
            yield GenerateChunk(id=header.id, text="", token_ids=[], prompt_logprobs=[None])

    def prompt(self, header: Header, _: int, tokens: Sequence[core.TokenEvent]) -> Iterable[BaseModel]:
        told: list[TokenLogprob | None] = [*self._shapes.generate(tokens)]
        yield GenerateChunk(id=header.id, text="", token_ids=[], prompt_logprobs=told)

    def token(self, header: Header, _: int, token: core.TokenEvent) -> Iterable[BaseModel]:
        logprobs = self._shapes.generate([token]) if self._logprobs else None
        yield GenerateChunk(id=header.id, text=token.text, token_ids=[token.token_id], logprobs=logprobs)

    def end(self, ending: Ending) -> Iterable[BaseModel]:
        yield self._answer(ending)

    def whole(self, endings: Sequence[Ending]) -> BaseModel:
        [ending] = endings
        answer = self._answer(ending)
        if self._logprobs:
            answer.logprobs = self._shapes.generate(ending.tokens)
        if self._prompt_logprobs:
            answer.prompt_logprobs = [None, *self._shapes.generate(ending.prompt)]
        return answer

    def _answer(self, ending: Ending) -> GenerateResponse:
        return GenerateResponse(
            id=ending.header.id,
            model=ending.header.model,
            text=ending.text,
            token_ids=[token.token_id for token in ending.tokens],
            finish_reason=ending.event.reason,
            usage=usage([ending]),
            rope=ending.rope,
            timing=ending.timing,
        )
