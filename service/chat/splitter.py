"""A generated text, taken apart as it comes: content, reasoning, tool calls. Knows one choice's text only."""

import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass

from service.chat.formats import ToolFormat
from service.chat.functions import Functions
from service.chat.reasoning import ReasoningMarkers
from service.chat.text_reader import (
    WHITE_SPACE,
    TextReader,
    UnexpectedTextError,
    Waiting,
    overlap,
    peek,
    read_if,
    read_run,
)


@dataclass(frozen=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call.

    Attributes:
        index: its number among the text's calls, from 0.
        id: by which the client's answer refers to it.
        name: of one of the request's functions.
        arguments: the text of a JSON object, as the model wrote it.
    """

    index: int
    id: str
    name: str
    arguments: str


Part = Content | Reasoning | ToolCall
Parts = Generator[Part | None, None, None]


@dataclass(frozen=True)
class Tools:
    """How the calls of a text are to be read.

    Attributes:
        format: how the model writes them.
        functions: what may be called.
        first_call_only: whether everything after the first call is dropped (`parallel_tool_calls: false`).
    """

    format: ToolFormat
    functions: Functions
    first_call_only: bool = False


def new_call_id() -> str:
    """An id as OpenAI's are."""
    return f"call_{secrets.token_hex(12)}"


class Splitter:
    """Takes one text apart. How the text is cut into pieces does not change what comes out, pieces of content and of
    reasoning put together.

    What may begin a marker is held back until it is decided, and so is a call until it is whole. A call that turns out
    to be none (broken JSON, cut off, the name of no function) comes out as content, as it was written. White space
    around calls is dropped, and so are the newlines at both ends of reasoning.

    Reasoning comes first or not at all: the text begins with its opening marker, or the prompt has ended with it. A
    closing marker without an opening one is content, since by then what stands before it is sent.
    """

    def __init__(
        self,
        *,
        tools: Tools | None = None,
        reasoning: ReasoningMarkers | None = None,
        inside_reasoning: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Begin a text.

        Args:
            tools: how calls are read, None where the request allows none: then nothing is taken for one.
            reasoning: the markers around reasoning, None where the model has none.
            inside_reasoning: whether the text begins after the opening marker (`ReasoningMarkers.opened_by`).
            new_id: makes a call's id.
        """
        self._tools = tools
        self._reasoning = reasoning
        self._inside = inside_reasoning
        self._new_id = new_id
        self._calls = 0
        self._done = False
        self._reader = TextReader()
        self._parts = self._split()

    @property
    def done(self) -> bool:
        """Whether nothing that follows can come out any more: generating it is in vain."""
        return self._done

    def feed(self, text: str) -> list[Part]:
        """Take the text's next piece.

        Returns:
            What it decides, perhaps nothing.
        """
        self._reader.text += text
        return self._decided()

    def end(self) -> list[Part]:
        """Nothing more will come: what was held back."""
        self._reader.ended = True
        return self._decided()

    def _decided(self) -> list[Part]:
        decided: list[Part] = []
        for part in self._parts:
            if part is None:
                break
            decided.append(part)
        return decided

    def _split(self) -> Parts:
        yield from self._read_reasoning()
        if self._tools is None:
            yield from self._read_until((), "", Content)
            return
        after_call = True  # the text's beginning is to a bare call what the end of another is
        while not self._done:
            bare = after_call and (yield from self._bare_call_follows(self._tools))
            if not bare:
                found = yield from self._read_until(self._tools.format.openings, WHITE_SPACE, Content)
                if not found:
                    return
            after_call = yield from self._read_calls(self._tools)

    def _read_reasoning(self) -> Parts:
        markers, reader = self._reasoning, self._reader
        if markers is None:
            return
        yield from read_run(reader, WHITE_SPACE)
        opened = yield from read_if(reader, markers.opening)  # some models repeat the prompt's
        if not opened:
            reader.at = 0
        if not opened and not self._inside:
            return
        yield from self._drop_newlines()
        closed = yield from self._read_until((markers.closing,), "\n", Reasoning)
        if closed:
            yield from read_if(reader, markers.closing)
            yield from self._drop_newlines()

    def _drop_newlines(self) -> Waiting[None]:
        yield from read_run(self._reader, "\n")
        self._reader.take()

    def _bare_call_follows(self, tools: Tools) -> Waiting[bool]:
        """Whether a call may begin here without a marker; white space before it is read."""
        if not tools.format.bare:
            return False
        yield from read_run(self._reader, WHITE_SPACE)
        follows = (yield from peek(self._reader)) == "{"
        return follows

    def _read_until(
        self, markers: tuple[str, ...], margin: str, kind: type[Content] | type[Reasoning]
    ) -> Generator[Part | None, None, bool]:
        """Put out text up to a marker.

        Args:
            markers: which.
            margin: characters that are held back before a marker.
            kind: what the text is.

        Returns:
            Whether there is one: then the reader stands at it, and what was held back before it is not taken. Otherwise
            the text has ended and all of it is out.
        """
        reader = self._reader
        while True:
            places = [place for marker in markers if (place := reader.text.find(marker, reader.at)) >= 0]
            held = max((overlap(reader.text[reader.at :], marker) for marker in markers), default=0)
            limit = min(places, default=len(reader.text) - held)
            over = reader.ended and not places
            reader.at = len(reader.text) if over else len(reader.text[:limit].rstrip(margin))
            if taken := reader.take():
                yield kind(taken)
            if over:
                return False
            reader.at = limit - len(taken)
            if places:
                return True
            yield None

    def _read_calls(self, tools: Tools) -> Generator[Part | None, None, bool]:
        """Put out the calls that begin where the reader stands, or the text that turns out to be none.

        Returns:
            Whether it ended with a call.
        """
        try:
            for call in tools.format.read(self._reader, tools.functions):
                if call is None:
                    yield None
                    continue
                self._reader.take()
                self._done = tools.first_call_only
                yield ToolCall(self._calls, self._new_id(), call.name, call.arguments)
                self._calls += 1
                if self._done:
                    return True
        except UnexpectedTextError:
            self._reader.at = len(self._reader.text[: self._reader.at].rstrip(WHITE_SPACE))  # a call may follow yet
            if raw := self._reader.take():
                yield Content(raw)
            return False
        yield from read_run(self._reader, WHITE_SPACE)
        self._reader.take()
        return True
