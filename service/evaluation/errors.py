"""Why something cannot be evaluated."""

from service.errors import RopewalkError


class EvaluationError(RopewalkError):
    """It cannot be measured as asked; the message says what to change."""
