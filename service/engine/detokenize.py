"""From token ids to text, a token at a time, and where a stop string ends it. Knows one sequence's text only."""

from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream(Protocol):
    """Turns tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that this token completes: whole characters only, perhaps none."""
        ...


class Detokenizer:
    """The `tokenizers` library's own incremental decoder, special tokens left out.

    Bytes of a character that is never completed are dropped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces.

    Text that might be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece.

        Returns:
            The text that is decided, and whether a stop string was met; that string and what follows it are dropped.
        """
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            decided, self._held = self._held[: min(found)], ""
            return decided, True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
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
