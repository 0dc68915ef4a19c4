"""Why a server cannot be measured."""

from service.errors import RopewalkError

KEY_STATUS = (401, 403)  # a key is needed, or another one


class BenchError(RopewalkError):
    """The server cannot be measured as asked; the message says what to change."""
