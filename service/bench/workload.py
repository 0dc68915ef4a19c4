"""What is sent, and when: prompts of exact lengths, tokens to generate. Sends nothing; a seed gives it all again."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from service.bench.errors import BenchError
from service.bench.lengths import Lengths
from service.bench.vocabulary import Vocabulary

Prompt = str | list[int]


@dataclass(frozen=True)
class Job:
    """One request to be made.

    Attributes:
        prompt: text, or token ids.
        prompt_tokens: its length, with what the server puts around it.
        max_tokens: to generate.
    """

    prompt: Prompt
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """A kind of jobs.

    Attributes:
        vocabulary: what prompts are made of.
        prompt_tokens: lengths of prompts.
        max_tokens: lengths of answers.
        shared_prefix_tokens: at the beginning of all prompts.
        overhead: tokens that the server puts around a prompt; they count as of the prompt's length.
        as_text: prompts are texts.
    """

    vocabulary: Vocabulary
    prompt_tokens: Lengths
    max_tokens: Lengths
    shared_prefix_tokens: int
    overhead: int
    as_text: bool

    def __post_init__(self) -> None:
        """
        Raises:
            BenchError: a prompt would have no room for a token of its own.
        """
        taken = max(self.shared_prefix_tokens, self.overhead + self.as_text)
        if self.prompt_tokens.least <= taken:
            raise BenchError(
                f"--prompt-tokens {self.prompt_tokens.text}: a prompt of {self.prompt_tokens.least} tokens has none of "
                f"its own beside {self.shared_prefix_tokens} shared and {self.overhead} that the server adds"
            )

    def jobs(self, number: int, seed: int) -> list[Job]:
        """So many jobs."""
        source = random.Random(seed)
        shared = self._choose(source, self.shared_prefix_tokens)
        return [self._job(source, shared) for _ in range(number)]

    def _job(self, source: random.Random, shared: list[int]) -> Job:
        length = self.prompt_tokens.draw(source)
        own = length - self.overhead - self.as_text  # a text has its opener
        places = shared[: max(0, self.shared_prefix_tokens - self.overhead - self.as_text)]
        places = places + self._choose(source, own - len(places))
        return Job(self._prompt(places), length, self.max_tokens.draw(source))

    def _choose(self, source: random.Random, number: int) -> list[int]:
        return source.choices(range(len(self.vocabulary.words)), k=number)

    def _prompt(self, places: list[int]) -> Prompt:
        if self.as_text:
            return " ".join((self.vocabulary.opener, *(self.vocabulary.words[place] for place in places)))
        return [self.vocabulary.token_ids[place] for place in places]


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the beginning at which requests arrive, the first at 0: a Poisson process.

    Args:
        rate: requests a second, in the mean.
        seed: of the gaps.
    """
    source = random.Random(seed)
    return itertools.accumulate((source.expovariate(rate) for _ in itertools.count()), initial=0.0)
