"""Guesses at what follows, from the sequence's own text: prompt-lookup decoding.

Where the latest tokens have occurred before, what followed them then is computed along with the next token, in the
same step, and kept as far as it turns out to be what is chosen. Each token is chosen as it would be without guesses,
with the same random number, so they change the time that a text takes and nothing else (the acceptance rule of
2211.17192 for a draft that is certain of its guess). No torch here.
"""

from service.core import Sequence

NGRAM = 3  # tokens that must have occurred before; of fewer, what follows is mostly chance
TRIES = 16.0  # guesses that a sequence may have wrong before it has shown that they pay
REWARD = 3.0  # tries that a right guess gives
RECOVERY = 1 / 16  # tries that come back with each token, so that a text that begins to quote is noticed


class PromptLookup:
    """What one sequence has said so far, and how well guesses from it have been."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: guesses in a step, at most.
        """
        self._most = most
        self._next: dict[tuple[int, ...], int] = {}  # an n-gram → the position after its latest occurrence
        self._num_seen = 0
        self._tries = TRIES

    def propose(self, sequence: Sequence) -> list[int]:
        """What may follow a sequence's known tokens; often nothing."""
        length = sequence.num_tokens
        tokens = sequence.tokens(max(0, self._num_seen - NGRAM + 1), length)
        offset = length - len(tokens)
        # The last n-gram is what is looked for: it is entered once something follows it.
        for start in range(len(tokens) - NGRAM):
            self._next[tuple(tokens[start : start + NGRAM])] = offset + start + NGRAM
        self._num_seen = max(self._num_seen, length - 1)
        most = min(self._most, int(self._tries), sequence.sampling.max_tokens - len(sequence.output) - 1)
        found = self._next.get(tuple(tokens[-NGRAM:])) if most > 0 else None
        return [] if found is None else sequence.tokens(found, min(found + most, length))

    def learn(self, proposed: int, accepted: int) -> None:
        """Take note of a step.

        Args:
            proposed: how many guesses were computed.
            accepted: how many of them were right.
        """
        gained = RECOVERY * (1 + accepted) + REWARD * accepted - (proposed - accepted)
        self._tries = max(0.0, min(self._tries + gained, TRIES))
