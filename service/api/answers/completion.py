"""The shapes of POST /v1/completions."""

from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from service import core
from service.api.answers.base import AnswerFormat, Ending, Header, usage
from service.api.logprobs import LogprobShapes
from service.api.responses import CompletionChoice, CompletionLogprobs, CompletionResponse

Pieces = Sequence[tuple[int, str]]
"""A prompt's tokens, each with the text that it completed."""


class CompletionFormat(AnswerFormat):
    """OpenAI's shape of a completion."""

    closing = "[DONE]"

    def __init__(self, logprobs: LogprobShapes | None, *, include_usage: bool, echo: Sequence[Pieces] = ()) -> None:
        """
        Args:
            logprobs: shapes log-probabilities; None where none are asked for.
            include_usage: whether a stream ends with one more chunk, the usage.
            echo: the prompts with which the texts begin; none where they do not.
        """
        self._shapes = logprobs
        self._include_usage = include_usage
        self._echo = echo
        self._lengths: dict[int, int] = {}  # of the texts that are out
        self._places: dict[int, int] = {}  # prompt tokens that are out

    def begin(self, header: Header) -> Iterable[BaseModel]:
        if self._echo:
            for index in range(header.num_choices):
                pieces = self._pieces(header, index)
                if self._shapes is None:
                    yield self._chunk(header, CompletionChoice(index=index, text=_text(pieces), finish_reason=None))
                else:
                    self._places[index] = 1
                    yield from self.token(header, index, _first(pieces))

    def prompt(self, header: Header, index: int, tokens: Sequence[core.TokenEvent]) -> Iterable[BaseModel]:
        start = self._places[index]
        self._places[index] += len(tokens)
        yield self._part(header, index, _with_text(tokens, self._pieces(header, index)[start:]))

    def token(self, header: Header, index: int, token: core.TokenEvent) -> Iterable[BaseModel]:
        if token.text or self._shapes is not None:
            yield self._part(header, index, [token])

    def end(self, ending: Ending) -> Iterable[BaseModel]:
        choice = CompletionChoice(index=ending.index, text=ending.text, finish_reason=ending.event.reason)
        yield self._chunk(ending.header, choice).model_copy(update={"rope": ending.rope})

    def close(self, endings: Sequence[Ending]) -> Iterable[BaseModel]:
        if self._include_usage:
            yield self._answer(endings, [])

    def whole(self, endings: Sequence[Ending]) -> BaseModel:
        return self._answer(endings, [self._choice(ending) for ending in endings])

    def _choice(self, ending: Ending) -> CompletionChoice:
        text, tokens = ending.text, ending.tokens
        if self._echo:
            pieces = self._pieces(ending.header, ending.index)
            text = _text(pieces) + text
            tokens = [_first(pieces), *_with_text(ending.prompt, pieces[1:]), *tokens]
        return CompletionChoice(
            index=ending.index,
            text=text,
            logprobs=None if self._shapes is None else self._shapes.completion(tokens, 0),
            finish_reason=ending.event.reason,
            rope=ending.rope_if_several,
        )

    def _part(self, header: Header, index: int, tokens: Sequence[core.TokenEvent]) -> CompletionResponse:
        """A chunk of a stream."""
        logprobs: CompletionLogprobs | None = None
        if self._shapes is not None:
            logprobs = self._shapes.completion(tokens, self._lengths.get(index, 0))
        text = "".join(token.text for token in tokens)
        self._lengths[index] = self._lengths.get(index, 0) + len(text)
        return self._chunk(header, CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=None))

    def _pieces(self, header: Header, index: int) -> Pieces:
        return self._echo[index // header.choices_per_prompt]

    def _answer(self, endings: Sequence[Ending], choices: list[CompletionChoice]) -> CompletionResponse:
        header = endings[0].header
        return CompletionResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=choices,
            usage=usage(endings),
            rope=endings[0].rope,
        )

    def _chunk(self, header: Header, choice: CompletionChoice) -> CompletionResponse:
        return CompletionResponse(id=header.id, created=header.created, model=header.model, choices=[choice])


def _text(pieces: Pieces) -> str:
    return "".join(text for _, text in pieces)


def _first(pieces: Pieces) -> core.TokenEvent:
    token, text = pieces[0]
    return core.TokenEvent(token, text)


def _with_text(tokens: Sequence[core.TokenEvent], pieces: Pieces) -> list[core.TokenEvent]:
    return [token._replace(text=text) for token, (_, text) in zip(tokens, pieces, strict=False)]
