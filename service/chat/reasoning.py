"""How models mark what they think before they answer. Knows templates as texts only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningMarkers:
    """The strings around reasoning."""

    opening: str
    closing: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that what is generated begins there."""
        return prompt.rstrip().endswith(self.opening)


REASONING = (ReasoningMarkers("<think>", "</think>"), ReasoningMarkers("[THINK]", "[/THINK]"))


def reasoning_of(template: str) -> ReasoningMarkers | None:
    """What a template's text shows of reasoning. Some templates only take it out of earlier turns: they have the
    closing marker alone."""
    return next((markers for markers in REASONING if markers.closing in template), None)
