"""Paired differences, against scipy's bootstrap."""

import numpy as np
import pytest
from scipy.stats import bootstrap

from service.evaluation.bootstrap import paired_bootstrap

SOURCE = np.random.default_rng(7)
THEIRS = SOURCE.normal(3, 2, size=12)  # documents differ far more than what is compared on them
OURS = THEIRS - 0.02 + SOURCE.normal(0, 0.1, size=12)


def test_the_interval_is_that_of_scipy() -> None:
    found = paired_bootstrap(OURS.tolist(), THEIRS.tolist())
    expected = bootstrap(
        (OURS - THEIRS,), np.mean, n_resamples=50_000, confidence_level=0.95, method="percentile", rng=3
    )
    assert found.mean == pytest.approx((OURS - THEIRS).mean())
    assert found.low == pytest.approx(expected.confidence_interval.low, abs=0.004)
    assert found.high == pytest.approx(expected.confidence_interval.high, abs=0.004)
    share = (expected.bootstrap_distribution < 0).mean()
    assert 0.5 < share < 1
    assert found.share_below == pytest.approx(share, abs=0.02)


def test_documents_are_paired() -> None:
    assert paired_bootstrap(OURS.tolist(), THEIRS.tolist()).high < 0.1
    assert paired_bootstrap(OURS.tolist(), THEIRS[::-1].tolist()).high > 0.5


def test_one_document_says_nothing_of_how_sure_it_is() -> None:
    found = paired_bootstrap([1.0], [1.5])
    assert (found.mean, found.low, found.high, found.documents) == (-0.5, -0.5, -0.5, 1)


def test_it_is_the_same_every_time_and_shown_with_its_sign() -> None:
    assert paired_bootstrap([1, 2, 4], [1, 3, 3]) == paired_bootstrap([1, 2, 4], [1, 3, 3])
    assert str(paired_bootstrap([1.25], [1.0])) == "+0.250 [+0.250, +0.250]"
