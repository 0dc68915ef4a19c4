"""Tasks whose answer stands somewhere in a long prompt: building them to an exact length, and scoring what is written.

Knows token ids and answers. Does not know models or schemes. Texts are plain, to be continued, so that base models can
do them as well as those tuned for chats.
"""

import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from service.evaluation.errors import EvaluationError

FILLER = "Rain fell on the hills in the morning. A cart went by. Nobody looked up. By noon it was dry again.\n"
NOUNS = (
    "anchor basket candle donkey easel fiddle garden hammer island jacket kettle ladder meadow needle orchard pebble"
)
NEEDLES = 4  # in the multi-key form
SPARE_TOKENS = 4  # that are generated beyond those of the answer


@dataclass(frozen=True)
class Question:
    """One prompt and what it must be answered with.

    Attributes:
        prompt: token ids.
        answer: the text that must come first.
        max_tokens: room for it.
    """

    prompt: list[int]
    answer: str
    max_tokens: int


Build = Callable[[Tokenizer, Sequence[int], int, float, int], Question]
"""(tokenizer, token ids of a text, tokens in all, depth from 0 to 1, seed) → a question. The same seed asks the same at
another depth."""


def is_answered(question: Question, text: str) -> bool:
    """Whether the text gives the answer, whole and before anything else: 123 does not answer 12."""
    return re.match(rf"\W*{re.escape(question.answer)}(?!\w)", text) is not None


def passkey(tokenizer: Tokenizer, text: Sequence[int], length: int, depth: float, seed: int) -> Question:
    """A number in the midst of a few sentences repeated over and over (after Mohtashami and Jaggi, 2305.16300)."""
    del text
    filler = _encode(tokenizer, FILLER)
    number = str(random.Random(seed).randrange(10_000, 100_000))
    return _hidden(
        tokenizer,
        filler * (length // len(filler) + 1),
        [(depth, f"\nThe pass key is {number}. Remember it: {number} is the pass key.\n")],
        f"\nWhat is the pass key in the text above? The pass key in the text above is {number}",
        number,
        length,
    )


def needle(tokenizer: Tokenizer, text: Sequence[int], length: int, depth: float, seed: int) -> Question:
    """One key with its number in a real text: the single-key form of RULER (2404.06654)."""
    return _needles(tokenizer, text, length, depth, seed, others=0)


def needles(tokenizer: Tokenizer, text: Sequence[int], length: int, depth: float, seed: int) -> Question:
    """Several keys, of which one is asked for: RULER's multi-key form. The others lie at random depths."""
    return _needles(tokenizer, text, length, depth, seed, others=NEEDLES - 1)


def key_value(tokenizer: Tokenizer, text: Sequence[int], length: int, depth: float, seed: int) -> Question:
    """Pairs of random identifiers, one of which is asked for: "lost in the middle" (2307.03172), by the place of the
    right pair. As many pairs as fit."""
    del text
    source = random.Random(seed)
    identifiers = [str(uuid.UUID(int=source.getrandbits(128), version=4)) for _ in range(length // 8)]
    pairs = list(zip(identifiers[::2], identifiers[1::2], strict=False))
    (key, answer), others = pairs[0], pairs[1:]

    def prompt(count: int) -> list[int]:
        place = round(depth * (count - 1))
        listed = [*others[:place], (key, answer), *others[place : count - 1]]
        lines = ",\n".join(f'"{name}": "{value}"' for name, value in listed)
        return _encode(tokenizer, f'{{{lines}}}\n\nIn the JSON object above, the value of "{key}" is "')

    room, max_tokens = _room(tokenizer, answer, length)
    low, high = 0, len(others) + 1
    while low < high:  # the most pairs that fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(prompt(middle)) <= room else (low, middle - 1)
    if low == 0:
        raise EvaluationError(f"{length} tokens are too few for a pair of keys and values")
    return Question(prompt(low), answer, max_tokens)


TASKS: dict[str, Build] = {"passkey": passkey, "needle": needle, "needles": needles, "key-value": key_value}


def _needles(
    tokenizer: Tokenizer, text: Sequence[int], length: int, depth: float, seed: int, *, others: int
) -> Question:
    source = random.Random(seed)
    keys = source.sample(NOUNS.split(), 1 + others)
    numbers = [str(source.randrange(1_000_000, 10_000_000)) for _ in keys]
    depths = [depth, *(source.random() for _ in range(others))]
    sentences = [f"\nThe secret number of the {key} is {number}.\n" for key, number in zip(keys, numbers, strict=True)]
    question = f"\nWhat is the secret number of the {keys[0]}? The secret number of the {keys[0]} is {numbers[0]}"
    return _hidden(tokenizer, text, list(zip(depths, sentences, strict=True)), question, numbers[0], length)


def _hidden(
    tokenizer: Tokenizer,
    hay: Sequence[int],
    sentences: list[tuple[float, str]],
    question: str,
    answer: str,
    length: int,
) -> Question:
    """Sentences at their depths in as much hay as makes the length exact, and the question, up to its answer."""
    placed = sorted((depth, _encode(tokenizer, sentence)) for depth, sentence in sentences)
    asked = _encode(tokenizer, question.removesuffix(f" {answer}"))
    room, max_tokens = _room(tokenizer, answer, length)
    straw = room - len(asked) - sum(len(tokens) for _, tokens in placed)
    if straw < 0 or straw > len(hay):
        raise EvaluationError(f"{length} tokens: {straw} of hay are needed, the text has {len(hay)}")
    prompt: list[int] = []
    start = 0
    for depth, tokens in placed:
        end = round(depth * straw)
        prompt += [*hay[start:end], *tokens]
        start = end
    return Question([*prompt, *hay[start:straw], *asked], answer, max_tokens)


def _room(tokenizer: Tokenizer, answer: str, length: int) -> tuple[int, int]:
    """Tokens of the prompt, and those that may be generated."""
    max_tokens = len(_encode(tokenizer, f" {answer}")) + SPARE_TOKENS
    return length - max_tokens, max_tokens


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
