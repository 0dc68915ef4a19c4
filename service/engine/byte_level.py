"""Text of byte-level tokenizers, whose tokens stand for bytes whatever is beside them. Knows the letters that such
vocabularies write bytes with; does not know other tokenizers."""

from codecs import getincrementaldecoder
from functools import cache

from tokenizers import Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel

_Utf8Decoder = getincrementaldecoder("utf-8")


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether its vocabulary writes bytes as letters."""
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


class TokenBytes(dict[int, bytes]):
    """The bytes that a token adds to a text, found when they are first asked for: none for special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Args:
            tokenizer: whose decoder is byte-level.
        """
        super().__init__()
        self._tokenizer = tokenizer
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}

    def __missing__(self, token_id: int) -> bytes:
        token = self.written(token_id)
        self[token_id] = b"" if token in self._special else bytes_of(token)
        return self[token_id]

    def written(self, token_id: int) -> str:
        """A token as the vocabulary writes it; nothing for one that it does not have."""
        return self._tokenizer.id_to_token(token_id) or ""


class ByteLevelDetokenizer:
    """Joins the bytes of tokens and lets characters out as they are complete: no token is decoded twice, nor beside
    others. Special tokens are left out, unless they are to be seen.

    Bytes of a character that the end of the text cuts off are dropped; others that are none come out as U+FFFD, as
    the tokenizer shows them.
    """

    def __init__(self, token_bytes: TokenBytes, visible_token_ids: frozenset[int] = frozenset()) -> None:
        """
        Args:
            token_bytes: of the model's tokenizer; sequences share it.
            visible_token_ids: special tokens that come out as they are written.
        """
        self._bytes = token_bytes
        self._visible = visible_token_ids
        self._utf8 = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._visible:
            return self.flush() + self._bytes.written(token_id)
        return self._utf8.decode(self._bytes[token_id])

    def flush(self) -> str:
        self._utf8.reset()
        return ""


def bytes_of(token: str) -> bytes:
    """A token of nothing but letters that stand for bytes is those bytes; any other, an added one, is what it says."""
    try:
        return bytes(map(_byte_letters().__getitem__, token))
    except KeyError:
        return token.encode()


@cache
def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies, as GPT-2 chose them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
    assert letters.keys() == set(ByteLevel.alphabet())
    return letters
