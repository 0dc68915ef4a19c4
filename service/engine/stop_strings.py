"""Where a stop string ends a text that arrives in pieces. Knows text only."""


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces.

    The first is the one that is complete first, so that it does not matter how the text was cut. Text that might be the
    beginning of a stop string is held back until it is decided.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece.

        Returns:
            The text that is decided, and whether a stop string was met; that string and what follows it are dropped.
        """
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, start = min(found)
            decided, self._held = self._held[:start], ""
            return decided, True
        keep = max(self._overlap(stop) for stop in self._stops)
        decided, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return decided, False

    def flush(self) -> str:
        """The text still held back; the end has come without a stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of the held text begin `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
