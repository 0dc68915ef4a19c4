"""`ropewalk eval`: what positional scaling does to a model's answers, on any text."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service import build
from service.cli import load_settings, naming_sources
from service.evaluation import decode
from service.evaluation.assembly import assemble
from service.evaluation.bench import Bench
from service.evaluation.ledger import Ledger
from service.evaluation.measures import MEASURES
from service.evaluation.plots import MISSING, can_plot
from service.evaluation.progress import compute_all
from service.evaluation.report import REPORT, write_report
from service.evaluation.schemes import check_schemes, parse_schemes
from service.evaluation.texts import read_texts, tokenize

CELLS = "cells.jsonl"
FAILED = 1  # the exit status of an evaluation that found what must not be


def evaluate(arguments: Mapping[str, Any]) -> None:
    """Measure, and write a report. What was measured before is not measured again.

    Exits with status 1 where short texts are not served as without a policy.

    Raises:
        StartupError: the model or a setting is wrong.
        EvaluationError: it cannot be measured as asked.
    """
    settings = load_settings(arguments)
    with naming_sources(arguments, settings):
        inspected = build.inspect(settings)
    names, lengths, folder = arguments["measure"], arguments["lengths"], Path(arguments["out"])
    schemes = parse_schemes(arguments["schemes"])
    check_schemes(schemes, inspected.policy)
    texts = read_texts(arguments["text"])
    longest = max(lengths) if "decode" not in names else max(*lengths, decode.crossing(inspected.policy).end)
    parts = assemble(settings, inspected, longest + 1)
    ledger = Ledger(folder / CELLS, parts.identity)
    bench = Bench(
        driver=parts.driver,
        policy=inspected.policy,
        tokenizer=parts.tokenizer,
        reference=parts.reference,
        schemes=schemes,
        lengths=lengths,
        streams=tokenize(texts, parts.tokenizer),
        documents=arguments["documents"],
    )
    began = time.monotonic()
    compute_all([job for name in names for job in MEASURES[name].jobs(bench)], ledger)
    shown = [MEASURES[name].show(bench, ledger) for name in names]
    about = {
        "model": inspected.name,
        "native length": inspected.policy.native_length,
        "ladder": ", ".join(f"{rung.factor:g} ({rung.scheme})" for rung in inspected.policy.rungs),
        "text": ", ".join(text.name for text in texts),
        "documents": f"{arguments['documents']} at most",
        **parts.identity,
        "seconds of this run": round(time.monotonic() - began),
    }
    write_report(folder, about, shown)
    print(folder / REPORT)
    if not can_plot():
        print(MISSING, file=sys.stderr)
    failures = [failure for section in shown for failure in section.failed]
    for failure in failures:
        print(f"ropewalk: failed: {failure}", file=sys.stderr)
    if failures:
        sys.exit(FAILED)
