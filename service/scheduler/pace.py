"""How much of the prompts a step may take while other requests decode. Knows numbers only."""

LEAST_SHARE = 8  # chunks never shrink below this part of a full one, or prompts would hardly go on
FEW = 16  # tokens; what fewer cost cannot be told from what any step costs, so chunks never shrink below that either


class Pace:
    """Chunks of prompts that keep a step near a length of time, found from what the last ones cost.

    The cost of a token is that of the whole step over its prompt tokens, the decoding requests' part included, so that
    chunks settle where steps take as long as wanted: n · (a + f / n) = seconds for a token's own cost a and a step's
    fixed cost f.
    """

    def __init__(self, seconds: float, max_tokens: int) -> None:
        """
        Args:
            seconds: that a step should take, about; 0 for as long as it takes.
            max_tokens: of a step.
        """
        self._seconds = seconds
        self._max_tokens = max_tokens
        self._cost: float | None = None  # seconds a prompt token

    @property
    def tokens(self) -> int:
        """Prompt tokens in a step that also decodes, at most."""
        if self._cost is None or self._seconds == 0:
            return self._max_tokens
        return min(self._max_tokens, max(FEW, self._max_tokens // LEAST_SHARE, int(self._seconds / self._cost)))

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took so long."""
        if tokens >= FEW and seconds > 0:
            self._cost = seconds / tokens
