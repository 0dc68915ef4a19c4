"""What has become of a whole request, as attributes and as numbers to record. Knows no OpenTelemetry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service import core
from service.core import FinishReason
from service.errors import CancelledError, DeadlineError, GenerationError
from service.tracing import names
from service.tracing.choice import EndedChoice

Attributes = Mapping[str, str | int | float | Sequence[str]]


@dataclass(frozen=True)
class Outcome:
    """An admitted request that has ended.

    Attributes:
        request_id: of the request.
        choices: all of them, prompt by prompt; at least one.
        choices_per_prompt: how many of them follow one prompt.
        timeout: after how many seconds its time was over; None if it was not.
    """

    request_id: str
    choices: Sequence[EndedChoice]
    choices_per_prompt: int
    timeout: float | None

    @property
    def error(self) -> str | None:
        """The code of what kept it from a good end."""
        reasons = {choice.reason for choice in self.choices}
        if FinishReason.ERROR in reasons:
            return GenerationError.code
        if FinishReason.CANCELLED in reasons:
            return CancelledError.code if self.timeout is None else DeadlineError.code
        return None

    @property
    def first_token(self) -> float | None:
        """Seconds from arrival to the first token of any choice; None without one."""
        return min((choice.first_token for choice in self.choices if choice.first_token is not None), default=None)

    @property
    def per_token(self) -> list[float]:
        """Of each choice that has one, the mean seconds of a token after its first."""
        return [choice.per_token for choice in self.choices if choice.per_token is not None]

    @property
    def input_tokens(self) -> int:
        """Tokens of its prompts, each counted once."""
        return sum(len(sequence.prompt) for sequence in self._firsts)

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.sequence.output) for choice in self.choices)

    def attributes(self) -> Attributes:
        """Of its span. The plan is that of the choice that went furthest."""
        furthest = max((choice.sequence for choice in self.choices), key=lambda sequence: sequence.last_plan.factor)
        sampling = furthest.sampling
        return {
            names.RESPONSE_ID: self.request_id,
            names.MAX_TOKENS: sampling.max_tokens,
            names.TEMPERATURE: sampling.temperature,
            names.TOP_P: sampling.top_p,
            names.CHOICES: self.choices_per_prompt,
            names.FINISH_REASONS: [choice.reason.value for choice in self.choices],
            names.INPUT_TOKENS: self.input_tokens,
            names.CACHED_TOKENS: sum(sequence.num_prefix_tokens or 0 for sequence in self._firsts),
            names.OUTPUT_TOKENS: self.output_tokens,
            names.ROPE_SCHEME: furthest.last_plan.scheme,
            names.ROPE_MODE: furthest.choice.mode,
            names.ROPE_FACTOR: furthest.last_plan.factor,
            names.ROPE_REROTATIONS: sum(choice.sequence.num_rerotations for choice in self.choices),
        }

    @property
    def _firsts(self) -> list[core.Sequence]:
        return [choice.sequence for choice in self.choices[:: self.choices_per_prompt]]
