"""One step after another: schedule, run, sample, report. Single-threaded; `service.engine.thread` gives it its thread.

Knows sequences, the scheduler and a runner. Does not know HTTP, asyncio or the model's insides.
"""

import logging
import time
from collections.abc import Callable

from service.core import FinishEvent, FinishReason, Sequence, Timing, TokenEvent
from service.engine import sampler
from service.engine.detokenize import StopStrings, TextStream
from service.engine.runner import Runner
from service.metrics import Metrics
from service.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Engine:
    """Owns the live sequences. Each that is added ends in exactly one `FinishEvent`, and its pages return."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        new_text_stream: Callable[[], TextStream],
        metrics: Metrics,
        page_bytes: int,
    ) -> None:
        """
        Args:
            runner: computes a step.
            scheduler: chooses a step.
            new_text_stream: makes a detokeniser for one sequence.
            metrics: counts what happens.
            page_bytes: bytes of one page of the cache, for the metrics.
        """
        self.scheduler = scheduler
        self._runner = runner
        self._new_text_stream = new_text_stream
        self._metrics = metrics
        self._page_bytes = page_bytes
        self._live: dict[Sequence, tuple[TextStream, StopStrings]] = {}
        pages = scheduler.pages
        metrics.cache_bytes.set(pages.num_pages * page_bytes)
        metrics.cache_tokens.set(pages.num_pages * pages.page_size)

    def add(self, sequence: Sequence) -> None:
        """Admit a sequence. It must fit the cache whole."""
        self.scheduler.add(sequence)
        self._live[sequence] = (self._new_text_stream(), StopStrings(sequence.sampling.stop))
        self._metrics.observe_admission(sequence)
        self._observe_load()

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence before its time; one that has ended already is left alone."""
        if sequence in self._live:
            self._finish(sequence, FinishReason.CANCELLED)
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
        step = self.scheduler.schedule()
        self._metrics.preemptions.inc(self.scheduler.num_preemptions - preempted)
        self._metrics.cache_evictions.inc(self.scheduler.pages.num_evictions - evicted)
        self._rerotate(step)
        if not step:
            self.scheduler.pages.check()
            return False
        plans = {sequence.plan for sequence in step}
        try:
            chosen = self._choose_tokens(step)
        except Exception as error:
            logger.exception("a step of %d requests failed", len(step))
            self._metrics.step_failures.inc()
            for sequence in step:
                self._finish(sequence, FinishReason.ERROR, error=f"{type(error).__name__} while computing a step")
        else:
            for sequence, token in chosen:
                self._advance_or_fail(sequence, token)
            self._metrics.iteration_tokens.observe(sum(step.values()))
            self._metrics.iteration_plans.observe(len(plans))
        self._observe_load()
        return True

    def _rerotate(self, step: dict[Sequence, int]) -> None:
        """Carry out what has to be before the step; a sequence whose keys cannot be moved ends, the others go on."""
        for rerotation in self.scheduler.take_rerotations():
            sequence, start = rerotation.sequence, time.monotonic()
            if sequence not in self._live:
                continue
            try:
                self._runner.rerotate(rerotation)
            except Exception as error:
                logger.exception("request %s could not move to another plan", sequence.request_id)
                step.pop(sequence, None)
                self._finish(sequence, FinishReason.ERROR, error=f"{type(error).__name__} while re-rotating keys")
            else:
                self._metrics.observe_rerotation(rerotation, time.monotonic() - start)

    def _choose_tokens(self, step: dict[Sequence, int]) -> list[tuple[Sequence, int]]:
        logits = self._runner.forward(step)
        ready = self.scheduler.complete(step)
        sampler.forbid_early_ends(logits, ready)
        tensors = sampler.prepare(ready, logits.shape[-1], logits.device)
        return list(zip(ready, sampler.sample(logits, tensors), strict=True))

    def _advance_or_fail(self, sequence: Sequence, token: int) -> None:
        try:
            self._advance(sequence, token)
        except Exception as error:
            logger.exception("request %s failed on token %d", sequence.request_id, token)
            if sequence in self._live:
                self._finish(sequence, FinishReason.ERROR, error=f"{type(error).__name__} while decoding a token")

    def _advance(self, sequence: Sequence, token: int) -> None:
        """Append a token to its sequence and report it; end the sequence if that was the last."""
        now = time.monotonic()
        self._metrics.observe_token(sequence, now)
        sequence.first_token_time = sequence.first_token_time or now
        sequence.last_token_time = now
        sequence.output.append(token)
        sampling = sequence.sampling
        if token in sampling.end_token_ids:
            sequence.deliver(TokenEvent(token, ""))
            self._finish(sequence, FinishReason.STOP)
            return
        stream, stops = self._live[sequence]
        text, stopped = stream.push(token), False
        if len(sequence.output) >= sampling.min_tokens:
            text, stopped = stops.push(text)
        sequence.deliver(TokenEvent(token, text))
        if stopped:
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
        stream, stops = self._live[sequence]
        text, stopped = stops.push(stream.flush())
        return text if stopped else text + stops.flush()

    def _observe_load(self) -> None:
        pages, metrics = self.scheduler.pages, self._metrics
        metrics.running.set(len(self.scheduler.running))
        metrics.cache_usage.set(pages.num_used / pages.num_pages)
        metrics.cache_used_bytes.set(pages.num_used * self._page_bytes)
        metrics.cache_kept_bytes.set(pages.num_kept * self._page_bytes)


def _log_end(sequence: Sequence, event: FinishEvent) -> None:
    """One line for each request: what it was, never what it said."""
    plan = sequence.history[-1].plan
    logger.info(
        "%s: %d + %d tokens under %s %g (%s), %s after %.3f s, first token after %.3f s",
        *(sequence.request_id, len(sequence.prompt), len(sequence.output)),
        *(plan.scheme, plan.factor, sequence.choice.mode, event.reason, event.timing.total, event.timing.first_token),
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
