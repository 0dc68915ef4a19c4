"""How often an answer is found, by depth and length: one measurement for each task of `retrieval`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from service.evaluation.bench import Bench
from service.evaluation.figures import HeatMap, Shown, Table
from service.evaluation.ledger import Job, Ledger
from service.evaluation.retrieval import TASKS, Question, is_answered
from service.evaluation.schemes import SchemeAsked, choose
from service.evaluation.texts import name_of
from service.scaling.policy import PlanChoice

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def jobs(bench: Bench, task: str) -> list[Job]:
    """A cell for each scheme, length, depth and sample: `found`, and the `text` that was written.

    The deepest come first: the others then begin as they do, up to where the answer stands.
    """
    return [
        Job(_key(task, choice, length, question), length, partial(_ask, bench, question, choice, length))
        for (_, length, _), (choice, questions) in _cells(bench, task).items()
        for question in questions
    ]


def _cells(bench: Bench, task: str) -> Mapping[tuple[SchemeAsked, int, float], tuple[PlanChoice, list[Question]]]:
    """The plan of each scheme and length, and at each depth the questions, one a document."""
    return {
        (scheme, length, depth): (choice, _questions(bench, task, length, depth))
        for scheme in bench.schemes
        for length in bench.lengths
        if (choice := choose(scheme, bench.policy, length)) is not None
        for depth in reversed(DEPTHS)
    }


def _questions(bench: Bench, task: str, length: int, depth: float) -> list[Question]:
    documents = bench.cut(length)
    return [TASKS[task](bench.tokenizer, text, length, depth, seed) for seed, text in enumerate(documents)]


def _key(task: str, choice: PlanChoice, length: int, question: Question) -> dict[str, Any]:
    path = [[plan.scheme, plan.factor, plan.fingerprint] for plan in choice.rungs]
    return {"measure": task, "path": path, "length": length, "prompt": name_of(question.prompt)}


def _ask(bench: Bench, question: Question, choice: PlanChoice, length: int) -> dict[str, Any]:
    assert len(question.prompt) + question.max_tokens <= length
    text = bench.driver.generate(question.prompt, choice, question.max_tokens)
    return {"found": is_answered(question, text), "text": text, "answer": question.answer}


def show(bench: Bench, ledger: Ledger, task: str) -> Shown:
    """Share of answers found: in a table by length, in a heat map by depth and length for each scheme."""
    shares: dict[tuple[SchemeAsked, int, float], float] = {}
    for (scheme, length, depth), (choice, questions) in _cells(bench, task).items():
        found = [bool(ledger[_key(task, choice, length, question)]["found"]) for question in questions]
        shares[scheme, length, depth] = sum(found) / len(found)
    rows = [
        [str(scheme), *(_over_depths(shares, scheme, length) for length in bench.lengths)] for scheme in bench.schemes
    ]
    note = f"Mean over {len(DEPTHS)} depths; up to {bench.documents} questions at each. Greedy, exact match."
    table = Table(f"{task}: share of answers found", ["scheme", *map(str, bench.lengths)], rows, note)
    return Shown(f"Retrieval: {task}", [table], [_map(bench, task, scheme, shares) for scheme in bench.schemes])


def _over_depths(shares: Mapping[tuple[SchemeAsked, int, float], float], scheme: SchemeAsked, length: int) -> str:
    values = [shares[scheme, length, depth] for depth in DEPTHS if (scheme, length, depth) in shares]
    return f"{sum(values) / len(values):.0%}" if values else ""


def _map(
    bench: Bench, task: str, scheme: SchemeAsked, shares: Mapping[tuple[SchemeAsked, int, float], float]
) -> HeatMap:
    return HeatMap(
        name=f"{task}-{str(scheme).replace(':', '-')}",
        title=f"{task}, {scheme}",
        across="tokens in all",
        up="depth of the answer",
        columns=[str(length) for length in bench.lengths],
        rows=[f"{depth:.0%}" for depth in DEPTHS],
        values=[[shares.get((scheme, length, depth)) for length in bench.lengths] for depth in DEPTHS],
    )
