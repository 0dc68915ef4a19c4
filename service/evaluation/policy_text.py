"""A calibrated policy as a policy file. Knows TOML and what was found; does not measure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from service.evaluation.calibration import Finding
from service.scaling.options import RopePolicy

REPLACED = ("scheme", "ladder", "max_length")
"""Options that a calibration decides; others are the operator's."""


def policy_text(findings: Sequence[Finding], options: RopePolicy, about: Mapping[str, Any]) -> str:
    """A policy file, with the figures that speak for it as comments.

    Args:
        findings: of every length, rising.
        options: those of the server that was calibrated; what was set there and is not decided here stays.
        about: what was measured and how, name to value.
    """
    return "\n".join(_lines(findings, options, about)) + "\n"


def _lines(findings: Sequence[Finding], options: RopePolicy, about: Mapping[str, Any]) -> Iterator[str]:
    yield "# By `ropewalk calibrate`, for --rope-policy. Negative log-likelihoods are in nats a token, over whole"
    yield "# requests of each length, and how far they are from others'; in brackets, the 95 % interval of a paired"
    yield "# bootstrap over documents, and in how many of its resamples the rung is the better one."
    yield from (f"# {name}: {' '.join(str(value).split())}" for name, value in about.items())
    kept = options.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    yield from (f"{name} = {_toml(value)}" for name, value in kept.items() if name not in REPLACED)
    yield f"max_length = {findings[-1].length}"
    yield "ladder = ["
    told: list[Finding] = []
    for finding in findings:
        told.append(finding)
        if finding.length == finding.chosen.covers:
            yield from (f"  # {line}" for each in told for line in in_words(each))
            yield f"  {_toml({'factor': finding.chosen.factor, 'scheme': finding.chosen.scheme})},"
            told = []
    yield "]"


def in_words(finding: Finding) -> Iterator[str]:
    """What was found out about one length, a line for each comparison."""
    chosen = finding.chosen
    yield f"{finding.length} tokens: {finding.nll:.3f} under {chosen.scheme} {chosen.factor:g}"
    for name, difference in finding.differences.items():
        better = f"better in {difference.share_below:.1%} of resamples"
        sure = better if difference.documents > 1 else "one document: not known how sure"
        yield f"  {difference} against {name} ({sure})"


def _toml(value: Any) -> str:
    """A value of TOML; JSON has the same notation but for tables."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(part)}" for name, part in value.items() if part is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
