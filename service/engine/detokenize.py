"""From token ids to text, a token at a time. Knows one sequence's text only."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from tokenizers import Tokenizer

from service.engine.byte_level import ByteLevelDetokenizer, TokenBytes, is_byte_level

REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that are not, or not yet, a character
MOST_PENDING = 16  # tokens; no character takes so many, what has not become text by then never will
MOST_CONTEXT = 8  # tokens; where more were decoded together, the newest ones alone are the context of the next


class TextStream(Protocol):
    """Turns tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that this token completes: whole characters only, perhaps none."""
        ...

    def flush(self) -> str:
        """The whole characters that wait for one that is not complete; no token follows."""
        ...


NewTextStream = Callable[[frozenset[int]], TextStream]
"""Makes a detokeniser for each sequence, which shows the special tokens that it is given and leaves out the others."""


def text_streams(tokenizer: Tokenizer) -> NewTextStream:
    """The fastest that gives this tokenizer's text. To be made once: what sequences can share, it keeps."""
    if is_byte_level(tokenizer):
        return partial(ByteLevelDetokenizer, TokenBytes(tokenizer))
    return partial(Detokenizer, tokenizer)


class Detokenizer:
    """Decodes the newest tokens together with those just before them, whatever the tokenizer; special tokens are left
    out, unless they are to be seen.

    What a token says can depend on its left neighbours: one character can take several tokens, and some tokenizers
    drop the space that begins a text. Bytes of a character that is never completed are dropped. Tokens whose text is
    out stay as context while they are few, for their text is known: seldom is a token decoded without a new one.
    """

    def __init__(self, tokenizer: Tokenizer, visible_token_ids: frozenset[int] = frozenset()) -> None:
        """
        Args:
            tokenizer: the model's.
            visible_token_ids: special tokens that come out as they are written.
        """
        self._tokenizer = tokenizer
        self._visible = visible_token_ids
        self._context: list[int] = []  # the latest tokens whose text is out
        self._known = ""  # what they decode to
        self._pending: list[int] = []  # those since, whose text is not

    def push(self, token_id: int) -> str:
        if token_id in self._visible:
            text = self.flush() + (self._tokenizer.id_to_token(token_id) or "")
            self._context, self._known, self._pending = [], "", []
            return text
        self._pending.append(token_id)
        tokens, whole, text = self._decode_pending()
        if len(self._pending) >= MOST_PENDING:
            text = text.rstrip(REPLACEMENT)
        elif not text or text.endswith(REPLACEMENT):
            return ""
        if len(tokens) > MOST_CONTEXT:
            tokens, whole = self._pending, self._decode(self._pending)
        self._context, self._known, self._pending = tokens, whole, []
        return text

    def flush(self) -> str:
        _, _, text = self._decode_pending()
        return text.rstrip(REPLACEMENT)

    def _decode_pending(self) -> tuple[list[int], str, str]:
        """The tokens that end with those whose text is not out, what they decode to, and what of that is new."""
        tokens = self._context + self._pending
        whole = self._decode(tokens)
        if whole.startswith(self._known):
            return tokens, whole, whole[len(self._known) :]
        # Where bytes decode in runs, an invalid one spoils valid ones before it.
        whole = self._decode(self._pending)
        return self._pending, whole, whole

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def pieces(stream: TextStream, token_ids: Iterable[int]) -> list[tuple[int, str]]:
    """Each of some tokens with the text that it completes; together that is their text.

    Args:
        stream: a new one.
        token_ids: in order.
    """
    found = [(token, stream.push(token)) for token in token_ids]
    if found:
        token, text = found[-1]
        found[-1] = (token, text + stream.flush())
    return found
