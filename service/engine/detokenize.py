"""From token ids to text, a token at a time, and where a stop string ends it. Knows one sequence's text only."""

from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that are not, or not yet, a character
MOST_PENDING = 16  # tokens; no character takes so many, what has not become text by then never will


class TextStream(Protocol):
    """Turns tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that this token completes: whole characters only, perhaps none."""
        ...

    def flush(self) -> str:
        """The whole characters that wait for one that is not complete; no token follows."""
        ...


class Detokenizer:
    """Decodes the newest tokens together with those just before them, special tokens left out.

    What a token says can depend on its left neighbours: one character can take several tokens, and some tokenizers
    drop the space that begins a text. Bytes of a character that is never completed are dropped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the latest tokens whose text is out
        self._pending: list[int] = []  # those since, whose text is not

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._pending_text()
        if len(self._pending) >= MOST_PENDING:
            text = text.rstrip(REPLACEMENT)
        elif not text or text.endswith(REPLACEMENT):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        return self._pending_text().rstrip(REPLACEMENT)

    def _pending_text(self) -> str:
        before, text = self._decode(self._context), self._decode(self._context + self._pending)
        # Where bytes decode in runs, an invalid one spoils valid ones before it.
        return text[len(before) :] if text.startswith(before) else self._decode(self._pending)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


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
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, start = min(found)
            decided, self._held = self._held[:start], ""
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
