"""The measurements by name: to add one, write its two functions and add its line."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from service.evaluation import decode, entropy, finding, guard, likelihood, sliding
from service.evaluation.bench import Bench
from service.evaluation.figures import Shown
from service.evaluation.ledger import Job, Ledger
from service.evaluation.retrieval import TASKS


class Measure(NamedTuple):
    """
    Attributes:
        jobs: the cells that it needs.
        show: what they say, once all are in the ledger.
    """

    jobs: Callable[[Bench], list[Job]]
    show: Callable[[Bench, Ledger], Shown]


MEASURES = {
    "guard": Measure(guard.jobs, guard.show),
    "nll": Measure(likelihood.jobs, likelihood.show),
    "sliding": Measure(sliding.jobs, sliding.show),
    "decode": Measure(decode.jobs, decode.show),
    **{task: Measure(partial(finding.jobs, task=task), partial(finding.show, task=task)) for task in TASKS},
    "entropy": Measure(entropy.jobs, entropy.show),
}
