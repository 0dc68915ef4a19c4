"""What can go wrong for a client of the API. Knows no HTTP library.

ClientError
├── ApiError           the server answered with an error, or ended a stream with one
├── UnreachableError   no connection came about; nothing was sent
└── BrokenAnswerError  the request was sent, and no whole answer that could be read came back
"""

from service.errors import RopewalkError


class ClientError(RopewalkError):
    """A call of the API did not succeed."""


class UnreachableError(ClientError):
    """No connection to the server came about; nothing was sent."""


class BrokenAnswerError(ClientError):
    """The request was sent, and its answer did not come, broke off, or is not what the API answers."""


class ApiError(ClientError):
    """The server answered with an error.

    Attributes:
        status: of the HTTP answer; 200 where the error came in a stream that had begun.
        code: the stable machine-readable code, None where the server gave none.
        param: dotted name of the offending field, None where no single field is to blame.
        message: what the server says, in words.
        request_id: under which the server logs the request, None where it named none.
        retry_after: seconds after which another try may succeed, as the answer's `Retry-After` has it.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.request_id = request_id
        self.retry_after = retry_after

    def __str__(self) -> str:
        code = "" if self.code is None else f" {self.code}"
        return f"{self.status}{code}: {self.message}"
