"""How sure a difference is. Knows numbers, one a document; does not know what they measure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences.

    Attributes:
        mean: over the documents.
        low: lower end of the interval that holds the true mean with `CONFIDENCE`.
        high: its upper end.
        share_below: in how many of the resamples the mean is below 0, from 0 to 1.
        documents: how many there are; of a single one, nothing is known of how sure it is.
    """

    mean: float
    low: float
    high: float
    share_below: float
    documents: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def paired_bootstrap(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Difference:
    """The mean of ours − theirs with a percentile interval (Efron and Tibshirani, An Introduction to the Bootstrap,
    chapter 13), documents drawn with replacement and each document's two numbers together.

    Args:
        ours: one number for each document.
        theirs: likewise, of the same documents.
        seed: of the resampling.
    """
    differences = np.subtract(ours, theirs)
    drawn = np.random.default_rng(seed).integers(len(differences), size=(RESAMPLES, len(differences)))
    means = differences[drawn].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Difference(float(differences.mean()), float(low), float(high), float((means < 0).mean()), len(differences))
