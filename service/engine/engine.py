"""One step after another: schedule, run, sample, report. Single-threaded; `service.engine.thread` gives it its thread.

Knows sequences, the scheduler and a runner. Does not know HTTP, asyncio or the model's insides.
"""

import dataclasses
import logging
import time
from dataclasses import dataclass
from itertools import zip_longest

import torch

from service.core import FinishEvent, FinishReason, PageCopy, Rerotation, Sequence, Timing, TokenEvent
from service.engine import grammar, logprobs, penalties, sampler
from service.engine.detokenize import NewTextStream, TextStream
from service.engine.grammar import Matcher
from service.engine.logprobs import TokenLogprobs
from service.engine.penalties import Adjustments
from service.engine.runner import Runner
from service.engine.speculation import PromptLookup
from service.engine.stop_strings import StopStrings
from service.metrics import Composition, Metrics
from service.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """What goes on from token to token in one live sequence, whether or not its pages are taken from it meanwhile.

    Attributes:
        text: its detokeniser.
        stops: finds its stop strings.
        adjustments: its bias and penalties, if any.
        matcher: where it is in its grammar, if it has one.
        lookup: guesses what follows, where that can pay.
    """

    text: TextStream
    stops: StopStrings
    adjustments: Adjustments | None
    matcher: Matcher | None
    lookup: PromptLookup | None


class Engine:
    """Owns the live sequences. Each that is added ends in exactly one `FinishEvent`, and its pages return."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        new_text_stream: NewTextStream,
        metrics: Metrics,
        page_bytes: int,
        *,
        max_draft: int = 0,
        max_rows_with_drafts: int = 0,
    ) -> None:
        """
        Args:
            runner: computes a step.
            scheduler: chooses a step.
            new_text_stream: makes a detokeniser for one sequence, which shows these special tokens.
            metrics: counts what happens.
            page_bytes: bytes of one page of the cache, for the metrics.
            max_draft: guesses at what follows that are computed with a sequence's next token, at most.
            max_rows_with_drafts: tokens that a step may have in all for guesses to be among them: more rows than that
                cost time.
        """
        self.scheduler = scheduler
        self._runner = runner
        self._new_text_stream = new_text_stream
        self._metrics = metrics
        self._page_bytes = page_bytes
        self._max_draft = max_draft
        self._max_rows_with_drafts = max_rows_with_drafts
        self._live: dict[Sequence, Progress] = {}
        self.num_failures_in_a_row = 0
        pages = scheduler.pages
        metrics.cache_bytes.set(pages.num_pages * page_bytes)
        metrics.cache_pages.set(pages.num_pages)
        metrics.cache_page_tokens.set(pages.page_size)
        metrics.cache_tokens.set(pages.num_pages // scheduler.needs.groups * pages.page_size)

    def add(self, sequence: Sequence) -> None:
        """Admit a sequence. It must fit the cache whole."""
        self.scheduler.add(sequence)
        sampling = sequence.sampling
        self._live[sequence] = Progress(
            text=self._new_text_stream(sampling.visible_token_ids),
            stops=StopStrings(sampling.stop),
            adjustments=penalties.adjustments_for(sequence),
            matcher=None if sampling.grammar is None else sampling.grammar.new_matcher(),
            lookup=PromptLookup(self._max_draft) if self._max_draft else None,
        )
        self._metrics.observe_admission(sequence)
        self._observe_load()

    def cancel(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence before its time; one that has ended already is left alone."""
        if sequence in self._live:
            self._finish(sequence, reason)
        self._observe_load()

    def end_all(self, reason: FinishReason) -> None:
        """End every live sequence, whatever goes wrong on the way."""
        for sequence in list(self._live):
            try:
                self._finish(sequence, reason)
            except Exception:
                logger.exception("request %s could not be ended cleanly", sequence.request_id)
        self._observe_load()

    def step(self) -> bool:
        """Compute one step. An error in it ends the sequences of that step and no others.

        Returns:
            False when there was nothing to do.
        """
        preempted, evicted = self.scheduler.num_preemptions, self.scheduler.pages.num_evictions
        with self._metrics.phase("schedule"):
            self._propose()
            step = self.scheduler.schedule()
        for sequence in self.scheduler.take_promotions():
            self._metrics.observe_promotion(sequence)
        self._metrics.preemptions.inc(self.scheduler.num_preemptions - preempted)
        self._metrics.cache_evictions.inc(self.scheduler.pages.num_evictions - evicted)
        has_failed = not self._prepare(step)
        if not step:
            self.scheduler.pages.check()
            return has_failed  # whoever failed has made room
        composition, start = Composition.of(step), time.perf_counter()
        try:
            chosen = self._choose_tokens(step)
        except Exception as error:
            logger.exception("a step of %d requests failed", len(step))
            self._metrics.step_failures.inc()
            self.num_failures_in_a_row += 1
            for sequence in step:
                self._finish(sequence, FinishReason.ERROR, error=f"{type(error).__name__} while computing a step")
        else:
            self.num_failures_in_a_row = 0
            now = time.monotonic()
            self._metrics.observe_tokens(chosen, now)
            for sequence, tokens in chosen.items():
                self._take(sequence, tokens, now)
            self._metrics.observe_step(composition)
            self.scheduler.pace.observe(composition.tokens - composition.decoding, time.perf_counter() - start)
        self._observe_load()
        return True

    def _prepare(self, step: dict[Sequence, int]) -> bool:
        """Carry out what has to be before the step, in order, copies that follow each other at once. Sequences whose
        pages cannot be moved or copied end, the others go on.

        Returns:
            Whether all went well.
        """
        went_well = True
        copies: list[PageCopy] = []
        for preparation in self.scheduler.take_preparations():
            if preparation.sequence not in self._live:
                continue
            if isinstance(preparation, PageCopy):
                copies.append(preparation)
            else:
                went_well = self._copy(copies, step) and went_well
                went_well = self._rerotate(preparation, step) and went_well
                copies = []
        return self._copy(copies, step) and went_well

    def _rerotate(self, rerotation: Rerotation, step: dict[Sequence, int]) -> bool:
        start = time.monotonic()
        try:
            with self._metrics.phase("rerotate"):
                self._runner.rerotate(rerotation)
        except Exception as error:
            logger.exception("request %s could not move to another plan", rerotation.sequence.request_id)
            self._fail(rerotation.sequence, step, error, "re-rotating keys")
            return False
        self._metrics.observe_rerotation(rerotation, time.monotonic() - start)
        return True

    def _copy(self, copies: list[PageCopy], step: dict[Sequence, int]) -> bool:
        if not copies:
            return True
        try:
            with self._metrics.phase("copy"):
                self._runner.copy(copies)
        except Exception as error:
            logger.exception("pages for %d requests could not be copied", len(copies))
            for copy in copies:
                self._fail(copy.sequence, step, error, "copying pages")
            return False
        return True

    def _fail(self, sequence: Sequence, step: dict[Sequence, int], error: Exception, doing: str) -> None:
        """End a sequence before its step."""
        step.pop(sequence, None)
        self._finish(sequence, FinishReason.ERROR, error=f"{type(error).__name__} while {doing}")

    def _propose(self) -> None:
        """Give sequences drafts, if the step has so few rows that some more cost little."""
        running = self.scheduler.running if self._max_draft else []
        room = self._max_rows_with_drafts - sum(sequence.num_uncomputed for sequence in running)
        for sequence in running:
            live = self._live[sequence]
            # Bias, penalties and grammars depend on the tokens before, and so does min_tokens.
            is_plain = live.adjustments is None and live.matcher is None
            if live.lookup is None or not is_plain or len(sequence.output) < max(1, sequence.sampling.min_tokens):
                continue
            sequence.draft = live.lookup.propose(sequence)[: max(0, room)]
            room -= len(sequence.draft)

    def _choose_tokens(self, step: dict[Sequence, int]) -> dict[Sequence, list[tuple[int, TokenLogprobs]]]:
        """Compute a step.

        Returns:
            For each sequence that has no uncomputed token left the token that follows, and those that follow its
            draft's first, second and further tokens.
        """
        with self._metrics.phase("forward"):
            logits = self._runner.forward(step)
        with self._metrics.phase("sample"):
            return self._choose_from(logits, step)

    def _choose_from(
        self, logits: torch.Tensor, step: dict[Sequence, int]
    ) -> dict[Sequence, list[tuple[int, TokenLogprobs]]]:
        logits = logprobs.tell_prompts(logits, step)
        ready = [s for s in self.scheduler.complete(step) for _ in range(1 + len(s.draft))]
        progress = [self._live[sequence] for sequence in ready]
        distributions = logprobs.distributions(logits, ready)
        penalties.apply(logits, {row: live.adjustments for row, live in enumerate(progress) if live.adjustments})
        grammar.rule_out(logits, {row: (ready[row], live.matcher) for row, live in enumerate(progress) if live.matcher})
        sampler.forbid_early_ends(logits, ready)
        tokens = sampler.sample(logits, sampler.prepare(ready, logits.shape[-1], logits.device))
        reports = distributions.report(tokens) if distributions else [TokenLogprobs()] * len(tokens)
        chosen: dict[Sequence, list[tuple[int, TokenLogprobs]]] = {}
        for sequence, token, reported in zip(ready, tokens, reports, strict=True):
            chosen.setdefault(sequence, []).append((token, reported))
        return chosen

    def _take(self, sequence: Sequence, tokens: list[tuple[int, TokenLogprobs]], now: float) -> None:
        """Advance a sequence by a token, and on while the draft has said what was chosen. The first has been counted,
        together with those of the step's other sequences."""
        draft, sequence.draft = sequence.draft, []
        right = 0
        for guess, (token, reported) in zip_longest(draft, tokens):
            if right:
                self._metrics.observe_tokens((sequence,), now)
            self._advance_or_fail(sequence, token, reported, now)
            if token != guess or sequence not in self._live:
                break
            right += 1
            sequence.num_computed += 1
        if draft:
            self._metrics.draft_tokens.inc(len(draft))
            self._metrics.accepted_tokens.inc(right)
        if (live := self._live.get(sequence)) is not None and live.lookup is not None:
            live.lookup.learn(len(draft), right)

    def _advance_or_fail(self, sequence: Sequence, token: int, reported: TokenLogprobs, now: float) -> None:
        try:
            self._advance(sequence, token, reported, now)
        except Exception as error:
            logger.exception("request %s failed on token %d", sequence.request_id, token)
            if sequence in self._live:
                self._finish(sequence, FinishReason.ERROR, error=f"{type(error).__name__} while decoding a token")

    def _advance(self, sequence: Sequence, token: int, reported: TokenLogprobs, now: float) -> None:
        """Append a token to its sequence and report it; end the sequence if that was the last."""
        sequence.first_token_time = sequence.first_token_time or now
        sequence.last_token_time = now
        sequence.output.append(token)
        if sequence.drawn:
            sequence.drawn.popleft()
        sampling, live = sequence.sampling, self._live[sequence]
        complete = live.matcher is not None and live.matcher.consume(token)
        if token in sampling.end_token_ids:
            sequence.deliver(TokenEvent(token, "", reported.logprob, reported.top))
            self._finish(sequence, FinishReason.STOP)
            return
        if live.adjustments is not None:
            live.adjustments.count(token)
        text, stopped = live.text.push(token), False
        if len(sequence.output) >= sampling.min_tokens:
            text, stopped = live.stops.push(text)
        sequence.deliver(TokenEvent(token, text, reported.logprob, reported.top))
        if stopped or complete:
            self._finish(sequence, FinishReason.STOP)
        elif len(sequence.output) == sampling.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """The one place where a sequence ends."""
        text = self._rest_of_text(sequence) if reason != FinishReason.ERROR else ""
        event = FinishEvent(reason, text, _timing(sequence, time.monotonic()), error)
        del self._live[sequence]
        try:
            self.scheduler.remove(sequence)
        finally:
            self._metrics.observe_end(sequence, event)
            sequence.deliver(event)
            _log_end(sequence, event)

    def _rest_of_text(self, sequence: Sequence) -> str:
        """Text that was held back until the end was known."""
        live = self._live[sequence]
        text, stopped = live.stops.push(live.text.flush())
        return text if stopped else text + live.stops.flush()

    def _observe_load(self) -> None:
        pages, metrics = self.scheduler.pages, self._metrics
        metrics.running.set(len(self.scheduler.running))
        metrics.cache_usage.set(pages.num_used / pages.num_pages)
        metrics.cache_used_bytes.set(pages.num_used * self._page_bytes)
        metrics.cache_kept_bytes.set(pages.num_kept * self._page_bytes)


def _log_end(sequence: Sequence, event: FinishEvent) -> None:
    """One line for each request: what it was, never what it said."""
    plan, timing = sequence.last_plan, event.timing
    fields = {
        "request_id": sequence.request_id,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": len(sequence.output),
        "cached_tokens": sequence.num_prefix_tokens or 0,
        "scheme": plan.scheme,
        "factor": plan.factor,
        "mode": sequence.choice.mode,
        "rerotations": sequence.num_rerotations,
        "finish_reason": event.reason.value,
        **{f"{stage.name}_seconds": getattr(timing, stage.name) for stage in dataclasses.fields(timing)},
    }
    logger.info(
        "%s: %d + %d tokens under %s %g (%s), %s after %.3f s, first token after %.3f s",
        *(sequence.request_id, len(sequence.prompt), len(sequence.output)),
        *(plan.scheme, plan.factor, sequence.choice.mode, event.reason, timing.total, timing.first_token),
        extra={"fields": fields},
    )


def _timing(sequence: Sequence, now: float) -> Timing:
    """Split a sequence's life; a stage that it never reached ends now."""
    scheduled = sequence.scheduled_time or now
    first = sequence.first_token_time or now
    return Timing(
        queue=scheduled - sequence.arrival_time,
        prefill=first - scheduled,
        decode=(sequence.last_token_time or now) - first,
        first_token=first - sequence.arrival_time,
        total=now - sequence.arrival_time,
    )
