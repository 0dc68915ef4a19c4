"""The nouns of the engine: what a request asks for, what becomes of it, and what it reports back.

Verbs live elsewhere. The stage that sets a field is named beside it. No torch here.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from model_patches.plan import PositionPlan
from service.scaling.policy import PlanChoice

if TYPE_CHECKING:
    from service.engine.grammar import Grammar


class FinishReason(StrEnum):
    """Why a request ended; every admitted request ends for exactly one of them."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens, or the end of its plan
    CANCELLED = "cancelled"  # the client went away, or the server is stopping
    ERROR = "error"  # the step that computed it failed


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: least probability relative to the likeliest token; 0 keeps all.
        seed: of the request's own random stream; None draws one.
        max_tokens: at most so many tokens are generated.
        min_tokens: no end token or stop string counts before so many tokens.
        stop: strings that end the text; they are not part of it.
        end_token_ids: tokens that end the text; empty under `ignore_eos`.
        logit_bias: added to the logits of these tokens, which the vocabulary must have.
        presence_penalty: taken off the logit of every token that was generated before; 0 is none.
        frequency_penalty: the same, once for each time that it was generated; 0 is none.
        repetition_penalty: a positive logit of a token in prompt or output is divided by it, a negative one multiplied;
            above 0, 1 is none.
        logprobs: how many of the likeliest tokens are reported with each token and its own log-probability; 0 reports
            its own only, None nothing.
        prompt_logprobs: the same for the prompt's tokens, which are then computed whatever the cache holds.
        visible_token_ids: special tokens that are part of the text; others are left out of it.
        grammar: what the text must match; it ends when nothing can follow, even before `min_tokens`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    end_token_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    visible_token_ids: frozenset[int] = frozenset()
    grammar: "Grammar | None" = None


@dataclass(frozen=True)
class Timing:
    """Where a finished request spent its time, in seconds.

    Attributes:
        queue: from arrival to the first step.
        prefill: from the first step to the first token.
        decode: from the first token to the last.
        first_token: from arrival to the first token.
        total: from arrival to the end.
    """

    queue: float
    prefill: float
    decode: float
    first_token: float
    total: float


class TokenEvent(NamedTuple):
    """One more token and the text that it completed: perhaps none, while a character or a stop string is under way.
    There is one for every token; a tuple is made faster than a dataclass.

    Log-probabilities are natural, and of the model's own distribution: see `service.engine.logprobs`.

    Attributes:
        logprob: of this token; None where the request asked for none.
        top_logprobs: (token id, log-probability) of the likeliest tokens, falling; this token may be among them.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptEvent:
    """The next of the prompt's tokens with their log-probabilities, for requests that ask for them.

    Attributes:
        tokens: without text, which the request has. The prompt's first token, which follows nothing, comes in none.
    """

    tokens: tuple[TokenEvent, ...]


@dataclass(frozen=True)
class FinishEvent:
    """The one terminal event of a request.

    Attributes:
        text: text that was held back until the end was known.
        error: what went wrong, for `FinishReason.ERROR`.
    """

    reason: FinishReason
    text: str
    timing: Timing
    error: str | None = None


Event = PromptEvent | TokenEvent | FinishEvent


class Segment(NamedTuple):
    """A stretch of a plan history: the tokens from `start` to the next segment's were computed under `plan`."""

    start: int
    plan: PositionPlan


@dataclass(init=False)
class PageTable:
    """The pages that a sequence holds in one group of layers.

    Attributes:
        first: the number in the sequence of the first of them: those before it are behind the group's window.
        pages: in order, without a gap; 32-bit numbers side by side, which a step's tensors copy as they are.
    """

    first: int
    pages: "array[int]"

    def __init__(self, first: int, pages: Iterable[int]) -> None:
        self.first = first
        self.pages = array("i", pages)

    @property
    def end(self) -> int:
        """The number of the page after the last one."""
        return self.first + len(self.pages)


@dataclass(eq=False)
class Sequence:
    """One request on its way through the engine; compared by identity.

    All its cached keys are rotated under one plan, that of `history[stage]`, also those of tokens that were computed
    under an earlier one. A sequence that is computed again goes through its history once more.

    Attributes:
        request_id: unique among the live requests.
        prompt: token ids.
        choice: the plan it runs under, why, and how much may be generated.
        sampling: how tokens are chosen.
        deliver: called by the engine's thread with each event; must not block.
    """

    request_id: str
    prompt: list[int]
    choice: PlanChoice
    sampling: SamplingParams
    deliver: Callable[[Event], None]
    arrival_time: float = field(default_factory=time.monotonic)
    random: Random = field(init=False)
    drawn: deque[float] = field(default_factory=deque)  # numbers of its random stream that are not used up

    # scheduler
    num_computed: int = 0  # tokens whose keys and values are in the pages
    tables: list[PageTable] = field(default_factory=list)  # one for each group of layers; empty while it holds no pages
    num_placed: int = 0  # tokens up to which every group has pages
    history: list[Segment] = field(init=False)  # the plans it has run under, those of a reused prefix included
    stage: int = 0  # the segment of the history that it is in
    rung: int = 0  # of choice.rungs, that of the history's last segment
    num_prefix_tokens: int | None = None  # found in the cache when it first started; None: not looked for
    num_other_plan_prefix_tokens: int = 0  # of those, the ones that were computed or rotated under another plan
    num_rerotations: int = 0  # times that growth moved its keys to another plan
    num_private: int = 0  # first pages that are never offered to others: they came from another plan
    num_indexed: int = 0  # pages that other sequences can find
    page_digests: list[bytes] = field(default_factory=list)  # of the full pages' tokens, as far as needed so far
    deadline: int = 0  # on the scheduler's clock of computed tokens
    scheduled_time: float | None = None  # of its first step

    # engine, after each step
    output: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)  # guesses at what follows, computed in the next step with the rest
    num_prompt_told: int = 1  # prompt tokens whose log-probability needs no more telling: the first has none
    first_token_time: float | None = None
    last_token_time: float | None = None

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.random = Random(None if seed is None else seed % 2**64)  # Random takes -1 for 1
        self.history = [Segment(0, self.choice.plan)]

    @property
    def plan(self) -> PositionPlan:
        """What the keys in the pages are rotated under."""
        return self.history[self.stage].plan

    @property
    def last_plan(self) -> PositionPlan:
        """The plan of the choice that it has grown to so far."""
        return self.choice.rungs[self.rung]

    @property
    def num_computable(self) -> int:
        """How many tokens can be computed before the keys must move to the next plan."""
        return self.computable_at(self.stage)

    def computable_at(self, stage: int) -> int:
        """The same at a stage of its history."""
        return self.history[stage + 1].start if stage + 1 < len(self.history) else self.last_plan.max_length

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that still need a forward pass: 1 while decoding."""
        return self.num_tokens - self.num_computed

    def next_draw(self, number: int = 0) -> float:
        """A number of its random stream, uniform in [0, 1): the one that its next token is chosen with, or a later one.
        The same until a token is chosen and its number leaves `drawn`."""
        while len(self.drawn) <= number:
            self.drawn.append(self.random.random())
        return self.drawn[number]

    @property
    def num_tokens_at_most(self) -> int:
        """The longest that this sequence can become."""
        return len(self.prompt) + self.sampling.max_tokens

    def logits_wanted(self, tokens: int) -> list[int]:
        """After which of the next `tokens` to be computed logits are wanted, counted from the first of them: after the
        last one that is known and the guesses that follow it, and after each that is followed by a prompt token whose
        log-probability is to be told.
        """
        start, end = self.num_computed, self.num_computed + tokens
        wanted = list(range(self.num_tokens - 1 - start, tokens))
        if self.sampling.prompt_logprobs is not None:
            told = range(max(start, self.num_prompt_told - 1), min(end, len(self.prompt) - 1))
            wanted = [position - start for position in told] + wanted
        return wanted

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens from start to stop (exclusive), counted over prompt, output and draft together."""
        length, known = len(self.prompt), self.num_tokens
        if length <= start and stop <= known:
            return self.output[start - length : stop - length]
        tokens = self.prompt[start:stop] + self.output[max(0, start - length) : max(0, stop - length)]
        return tokens + self.draft[: stop - known] if stop > known else tokens


@dataclass(frozen=True)
class PageMove:
    """One page of a sequence on its way to another plan.

    Attributes:
        source: the page that holds it now.
        target: the page that will: the same one, unless others hold the source too.
        number: which page of its sequence it is, from 0: this tells the positions.
        group: the group of layers whose keys and values it holds.
    """

    source: int
    target: int
    number: int
    group: int = 0


@dataclass(frozen=True)
class Rerotation:
    """Keys of one sequence that move from one plan to another, to be carried out before the next step.

    Attributes:
        sequence: whose they are.
        old: the plan that the sources are rotated under.
        new: the plan that the targets will be.
        moves: the pages.
        tokens: how many tokens they hold.
    """

    sequence: Sequence
    old: PositionPlan
    new: PositionPlan
    moves: list[PageMove]
    tokens: int


@dataclass(frozen=True)
class PageCopy:
    """One page that a sequence gets a copy of to go on in, in each group of layers; made before the next step.

    Attributes:
        sequence: whose the copies are.
        sources: a page for each group.
        targets: pages of the sequence.
        tokens: how many first tokens of the page are the sequence's.
    """

    sequence: Sequence
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    tokens: int


def sources_and_targets(copies: Iterable[PageCopy]) -> tuple[list[int], list[int]]:
    """The pages that some copies read, and those that they write, in the same order."""
    pairs = [pair for copy in copies for pair in zip(copy.sources, copy.targets, strict=True)]
    return [source for source, _ in pairs], [target for _, target in pairs]


Preparation = Rerotation | PageCopy
"""What has to be carried out before a step."""
