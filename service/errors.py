"""Errors that a client or an operator can cause, without any knowledge of HTTP.

    RopewalkError
    ├── StartupError              the server cannot start as configured
    ├── RankLostError             one of the processes that the model is split over has ended
    └── RequestError              one request is refused; carries param and code
        ├── ContextLengthError    prompt, or prompt + max_tokens, above the maximum length
        ├── LimitError            a value is within the field's range, but above a limit that the operator set
        ├── WishError             the request's `rope` wish cannot be granted
        ├── UnknownModelError     the request names a model that is not served here
        ├── KeyRequiredError      the request has no valid key
        ├── QueueFullError        the waiting queue is full; try again later
        ├── KeyBusyError          the key has as many requests under way as it may
        ├── DeadlineError         an admitted request took longer than it may
        ├── NotReadyError         the model is still loading, or the server is draining
        ├── GenerationError       an admitted request failed inside the engine
        └── CancelledError        an admitted request was ended before its time

`service.api.errors` maps each of them to one HTTP status.
"""


class RopewalkError(Exception):
    """Root of all errors of this project."""


class StartupError(RopewalkError):
    """The server cannot start: an unsupported model, a setting out of range, a missing file."""


class RankLostError(RopewalkError):
    """One of the processes that the model is split over has ended or failed, so none of them can go on."""


class RequestError(RopewalkError):
    """One request is refused.

    Args:
        message: says the field, the value and the limit.
        param: dotted name of the offending field, None where no single field is to blame.
        code: a stable machine-readable code, as in OpenAI's error objects.

    Attributes:
        retry_after: seconds after which another try may succeed; None where nothing is known of that.
    """

    code = "invalid_value"
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthError(RequestError):
    """The request does not fit the maximum length."""

    code = "context_length_exceeded"


class LimitError(RequestError):
    """A value is above a limit of this server's settings; the code is the setting's name with `_exceeded`."""


class WishError(RequestError):
    """The request's `rope` wish cannot be granted; the message says what is allowed."""

    code = "rope_not_available"


class KeyRequiredError(RequestError):
    """The request has no valid key."""

    code = "invalid_api_key"


class QueueFullError(RequestError):
    """The waiting queue is full."""

    code = "queue_full"


class KeyBusyError(RequestError):
    """The key has as many requests under way as it may."""

    code = "too_many_requests"


class DeadlineError(RequestError):
    """An admitted request took longer than it, or the server, allows."""

    code = "deadline_exceeded"


class NotReadyError(RequestError):
    """The model is still loading, or the server is draining."""

    code = "not_ready"


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class GenerationError(RequestError):
    """An admitted request failed inside the engine."""

    code = "generation_failed"


class CancelledError(RequestError):
    """An admitted request was ended because the server is shutting down, or because its client went away."""

    code = "cancelled"
