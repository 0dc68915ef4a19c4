"""From the bytes of an answer to values and errors. Does not know how they came, nor what is done about them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from service.client.calls import Answer, Call, Chunk, StreamCall
from service.client.errors import ApiError, BrokenAnswerError
from service.client.sse import SseDecoder

REQUEST_ID = "X-Request-Id"
DONE = "[DONE]"
SHOWN_LENGTH = 200


@dataclass(frozen=True)
class Reply(Generic[Answer]):
    """An answer and what came with it.

    Attributes:
        value: the answer.
        request_id: under which the server logs the request, None where it names none.
    """

    value: Answer
    request_id: str | None


def read_reply(call: Call[Answer], body: bytes, request_id: str | None) -> Reply[Answer]:
    """The value of a successful answer.

    Raises:
        BrokenAnswerError: it is not what the API answers.
    """
    try:
        return Reply(call.read(body), request_id)
    except ValueError as error:
        shown = _shorten(body.decode(errors="replace"))
        raise BrokenAnswerError(f"{call.path} answered with something else than expected: {shown!r}") from error


def read_error(status: int, body: bytes, *, request_id: str | None, retry_after: float | None) -> ApiError:
    """What an answer says that is not successful, in OpenAI's shape or in any other."""
    try:
        told = _error_in(json.loads(body))
    except ValueError:
        told = None
    if told is None:
        text = _shorten(" ".join(body.decode(errors="replace").split()))
        told = {"message": text or "the server gave no reason"}
    return _api_error(status, told, request_id=request_id, retry_after=retry_after)


class StreamReader(Generic[Chunk]):
    """Takes the bytes of one stream, cut anywhere, and gives its chunks."""

    def __init__(self, call: StreamCall[Chunk], request_id: str | None) -> None:
        self._call = call
        self._request_id = request_id
        self._decoder = SseDecoder()
        self._may_end = False
        self._is_done = False

    def feed(self, received: bytes) -> Iterator[Chunk]:
        """Take what came next; yields the chunks that it completes.

        Raises:
            ApiError: the stream says that the request failed; chunks before that are yielded first.
            BrokenAnswerError: an event is not what the API sends.
        """
        for data in self._decoder.feed(received):
            self._is_done = self._is_done or data == DONE
            if not self._is_done:
                chunk = self._read(data)
                self._may_end = self._call.is_last(chunk)
                yield chunk

    def finish(self) -> None:
        """The connection was closed.

        Raises:
            BrokenAnswerError: before the end of the stream.
        """
        if not (self._is_done or self._may_end):
            raise BrokenAnswerError("the stream ended before its last event")

    def _read(self, data: str) -> Chunk:
        try:
            # Most events have no error: those are parsed once, by pydantic.
            told = _error_in(json.loads(data)) if '"error"' in data else None
            if told is not None:
                raise _api_error(200, told, request_id=self._request_id, retry_after=None)
            return self._call.read(data)
        except ValueError as error:
            raise BrokenAnswerError(f"an event is not what the API sends: {_shorten(data)!r}") from error


def _api_error(status: int, told: Mapping[str, Any], *, request_id: str | None, retry_after: float | None) -> ApiError:
    code, param = told.get("code"), told.get("param")
    return ApiError(
        str(told.get("message") or "the server gave no reason"),
        status=status,
        code=None if code is None else str(code),
        param=None if param is None else str(param),
        request_id=request_id,
        retry_after=retry_after,
    )


def _error_in(parsed: Any) -> Mapping[str, Any] | None:
    """The error object of a JSON value; None if it has none. FastAPI's own errors have `detail`."""
    if not isinstance(parsed, dict):
        return None
    error = parsed.get("error") or parsed.get("detail")
    return error if error is None or isinstance(error, dict) else {"message": str(error)}


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_LENGTH else text[:SHOWN_LENGTH] + "..."
