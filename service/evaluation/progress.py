"""Computes what is missing, with a progress bar. Knows jobs and a ledger; does not know what they measure."""

from collections.abc import Iterable

from tqdm import tqdm

from service.evaluation.ledger import Job, Ledger


def compute_all(jobs: Iterable[Job], ledger: Ledger) -> None:
    """Compute every job that the ledger does not have; each is kept as soon as it is done.

    The bar counts tokens, for cells differ in length, and starts from those that need no computing.
    """
    asked = list(jobs)
    with tqdm(total=sum(job.tokens for job in asked), unit="tok", unit_scale=True, disable=None) as bar:
        for job in sorted(asked, key=lambda job: ledger.get(job.key) is None):
            bar.set_description(str(job.key["measure"]))
            ledger.compute(job)
            bar.update(job.tokens)
