"""`ropewalk calibrate`: the policy that predicts the user's own texts best."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service import build
from service.cli import load_settings, naming_sources
from service.evaluation import calibration
from service.evaluation.assembly import assemble
from service.evaluation.bench import Bench
from service.evaluation.errors import EvaluationError
from service.evaluation.ledger import Ledger
from service.evaluation.policy_text import in_words, policy_text
from service.evaluation.progress import compute_all
from service.evaluation.texts import read_texts, tokenize
from service.scaling.fixed import FixedPolicy


def calibrate(arguments: Mapping[str, Any]) -> None:
    """Try schemes and ladders, write the best one as a policy file, and say how much better it is.

    Raises:
        StartupError: the model or a setting is wrong.
        EvaluationError: it cannot be measured as asked, or the file cannot be written.
    """
    settings = load_settings(arguments)
    with naming_sources(arguments, settings):
        inspected = build.inspect(settings)
    file, longest = Path(arguments["out"]), arguments["max_length"]
    if file.suffix != ".toml":
        raise EvaluationError(f"--out: a policy file ends in .toml here, it is {file}")
    policy = inspected.policy
    if isinstance(policy, FixedPolicy):
        raise EvaluationError(f"there is nothing to calibrate: {policy.why}")
    tried = calibration.candidates(policy, arguments["schemes"].split(","), arguments["factors"], longest)
    plans = calibration.wanted(tried, policy)
    texts = read_texts(arguments["text"])
    parts = assemble(settings, inspected, longest + 1)
    ledger = Ledger(arguments["cells"] or file.with_suffix(".cells.jsonl"), parts.identity)
    bench = Bench(
        driver=parts.driver,
        policy=policy,
        tokenizer=parts.tokenizer,
        reference=parts.reference,
        schemes=(),
        lengths=sorted({length for _, length in plans}),
        streams=tokenize(texts, parts.tokenizer),
        documents=arguments["documents"],
    )
    jobs = calibration.jobs(bench, plans)
    compute_all(jobs, ledger)
    findings = calibration.calibrate(bench, ledger, plans)
    about = {
        "model": inspected.name,
        "text": ", ".join(text.name for text in texts),
        "documents": len(bench.cut(longest)),
        "tried": ", ".join(map(calibration.described, tried)),
        "computed in": f"{sum(ledger.seconds(job.key) for job in jobs):.0f} s",
        **parts.identity,
    }
    try:
        file.write_text(policy_text(findings, policy.options, about), encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"--out: {error}") from error
    for finding in findings:
        print("\n".join(in_words(finding)))
    print(f"{file}: {len(tried)} rungs tried, computed in {about['computed in']}")
