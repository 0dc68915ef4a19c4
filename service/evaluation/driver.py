"""The serving engine without threads and HTTP, one request at a time.

Knows the engine's parts. Does not know what is measured, or on which text.
"""

import hashlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from service import core
from service.cache.pages import PageAllocator
from service.core import Event, FinishEvent, FinishReason, PromptEvent, SamplingParams, Sequence, TokenEvent
from service.engine.detokenize import text_streams
from service.engine.engine import Engine
from service.engine.runner import Runner
from service.evaluation.errors import EvaluationError
from service.metrics import Metrics
from service.scaling.policy import PlanChoice
from service.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Scored:
    """What the engine thinks of a prompt.

    Attributes:
        nll: negative log-likelihood of each token but the first, in nats.
        digest: of all logits, to the last bit.
    """

    nll: list[float]
    digest: str


class HashingRunner:
    """A runner that sums up the logits of another as they come."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._sum = hashlib.blake2b()

    def forward(self, step: Mapping[Sequence, int]) -> torch.Tensor:
        logits = self._runner.forward(step)
        self._sum.update(logits.cpu().contiguous().numpy().data)
        return logits

    def rerotate(self, rerotation: core.Rerotation) -> None:
        self._runner.rerotate(rerotation)

    def copy(self, copies: SequenceOf[core.PageCopy]) -> None:
        self._runner.copy(copies)

    def take_digest(self) -> str:
        """Of what came since the last call."""
        digest, self._sum = self._sum.hexdigest(), hashlib.blake2b()
        return digest


class Driver:
    """Runs requests through an `Engine` of its own, to their end, one after another."""

    def __init__(
        self,
        runner: Runner,
        pages: PageAllocator,
        tokenizer: Tokenizer,
        *,
        end_token_ids: frozenset[int] = frozenset(),
        page_bytes: int = 0,
        max_batch_tokens: int = 512,
        refresh_tokens: int = 0,
    ) -> None:
        """
        Args:
            runner: of the model.
            pages: of its pool.
            tokenizer: of the model.
            end_token_ids: tokens that end a generated text.
            page_bytes: bytes of one page.
            max_batch_tokens: tokens computed in one step, at most.
            refresh_tokens: latest tokens that are computed anew after a re-rotation.
        """
        self._runner = HashingRunner(runner)
        self._pages = pages
        self._end_token_ids = end_token_ids
        self._new_scheduler = partial(
            Scheduler, pages, max_running=1, max_batch_tokens=max_batch_tokens, refresh_tokens=refresh_tokens
        )
        self._engine = Engine(
            self._runner,
            self._new_scheduler(),
            text_streams(tokenizer),
            Metrics(CollectorRegistry()),
            page_bytes,
        )
        self._numbers = count()

    @property
    def room(self) -> int:
        """The longest sequence that the cache holds, in tokens."""
        return self._pages.num_pages * self._pages.page_size

    def score(self, prompt: list[int], choice: PlanChoice) -> Scored:
        """What the engine thinks of each token of a prompt, given those before; one token is generated after it.

        Args:
            prompt: at least one token.
            choice: the plans; the whole prompt is computed under the first.

        Raises:
            EvaluationError: the engine failed, or its cache is too small.
        """
        nll: list[float] = []

        def take(event: Event) -> None:
            if isinstance(event, PromptEvent):
                nll.extend(-token.logprob for token in event.tokens if token.logprob is not None)

        self._runner.take_digest()
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        self._run(prompt, choice, sampling, take)
        return Scored(nll, self._runner.take_digest())

    def generate(self, prompt: list[int], choice: PlanChoice, max_tokens: int) -> str:
        """The text that the engine writes after a prompt, greedily.

        Raises:
            EvaluationError: the engine failed, or its cache is too small.
        """
        pieces: list[str] = []

        def take(event: Event) -> None:
            if isinstance(event, TokenEvent | FinishEvent):
                pieces.append(event.text)

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, end_token_ids=self._end_token_ids)
        self._run(prompt, choice, sampling, take)
        return "".join(pieces)

    def force(self, prompt: list[int], given: list[int], choice: PlanChoice, *, stale: bool = False) -> list[float]:
        """Decode given tokens one at a time instead of chosen ones, growing from plan to plan as the scheduler says.

        Args:
            prompt: prefilled.
            given: then decoded.
            choice: the plans.
            stale: leave cached keys where they are when the plan changes, as no server here does.

        Returns:
            The negative log-likelihood of each given token, in nats.

        Raises:
            EvaluationError: the cache is too small.
        """
        self._ensure_room(len(prompt) + len(given))
        scheduler = self._new_scheduler(prefix_caching=False)  # stale keys must be nobody's prefix
        sampling = SamplingParams(max_tokens=len(given))
        sequence = Sequence(f"evaluation-{next(self._numbers)}", list(prompt), choice, sampling, lambda _: None)
        scheduler.add(sequence)
        nll: list[float] = []
        while len(nll) < len(given):
            step = scheduler.schedule()
            for preparation in scheduler.take_preparations():
                assert not isinstance(preparation, core.PageCopy)  # there are no prefixes
                if not stale:
                    self._runner.rerotate(preparation)
            logits = self._runner.forward(step)
            if scheduler.complete(step):
                token = given[len(nll)]
                nll.append(-float(logits[-1].log_softmax(dim=-1)[token]))
                sequence.output.append(token)
        scheduler.remove(sequence)
        return nll

    def _ensure_room(self, tokens: int) -> None:
        if tokens > self.room:
            raise EvaluationError(f"{tokens} tokens do not fit the cache's {self.room}")

    def _run(
        self,
        prompt: list[int],
        choice: PlanChoice,
        sampling: SamplingParams,
        take: Callable[[Event], None],
    ) -> None:
        ends: list[FinishEvent] = []

        def deliver(event: Event) -> None:
            if isinstance(event, FinishEvent):
                ends.append(event)
            take(event)

        self._ensure_room(len(prompt) + sampling.max_tokens)
        self._engine.add(Sequence(f"evaluation-{next(self._numbers)}", list(prompt), choice, sampling, deliver))
        while self._engine.step():
            pass
        [end] = ends
        if end.reason == FinishReason.ERROR:
            raise EvaluationError(f"the engine failed: {end.error}")
