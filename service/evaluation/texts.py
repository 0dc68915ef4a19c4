"""Where the text to evaluate on comes from, and its documents of exact lengths. Knows files and token ids; does not
know what is measured on them.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

from service.evaluation.errors import EvaluationError


@dataclass(frozen=True)
class Text:
    """One coherent text; documents never cross from one to another.

    Attributes:
        name: of the file, or of the built-in text.
        content: the text itself.
    """

    name: str
    content: str


def builtin_text() -> Text:
    """The language reference that comes with every Python for `help()`: some 700,000 characters of English and code."""
    return Text("the Python language reference", "\n\n".join(topics[name] for name in sorted(topics)))


def read_texts(files: Iterable[Path]) -> list[Text]:
    """Each file is a text; without any, the built-in one.

    Raises:
        EvaluationError: a file cannot be read, or is not UTF-8.
    """
    try:
        return [Text(file.name, file.read_text(encoding="utf-8")) for file in files] or [builtin_text()]
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"--text: {error}") from error


def name_of(tokens: Iterable[int]) -> str:
    """What tells a document from every other."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def tokenize(texts: Iterable[Text], tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each text, without special tokens: what a document begins with is not its text's beginning."""
    return [list(tokenizer.encode(text.content, add_special_tokens=False).ids) for text in texts]


def documents(streams: Sequence[Sequence[int]], length: int, most: int) -> list[list[int]]:
    """Documents of exactly `length` tokens, none of which overlap.

    Where there are more than wanted, they are taken evenly from all over the texts, and the same ones every time.

    Args:
        streams: token ids of each text.
        length: in tokens.
        most: so many at most.

    Raises:
        EvaluationError: not even one text is that long.
    """
    cut = [
        list(stream[start : start + length])
        for stream in streams
        for start in range(0, len(stream) - length + 1, length)
    ]
    if not cut:
        longest = max(map(len, streams))
        raise EvaluationError(f"no text has the {length} tokens that a document needs, the longest has {longest}")
    count = min(most, len(cut))
    return [cut[number * len(cut) // count] for number in range(count)]
