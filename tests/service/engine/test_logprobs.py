"""Log-probabilities: the model's own, whatever is done to the logits after."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import SamplingParams, Sequence
from service.engine import logprobs
from service.engine.logprobs import TokenLogprobs
from service.scaling.policy import Policy
from tests.fakes import GEOMETRY

CHOICE = Policy(GEOMETRY).choose(1, 1)


def sequences(counts: list[int | None]) -> list[Sequence]:
    return [
        Sequence("request", [0], CHOICE, SamplingParams(max_tokens=1, logprobs=count), deliver=lambda _: None)
        for count in counts
    ]


@settings(deadline=None, max_examples=200)
@given(
    counts=st.lists(st.none() | st.integers(0, 30), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    scale=st.floats(0.1, 30),
)
def test_each_row_gets_its_tokens_and_the_likeliest_ones_as_float64_has_them(
    counts: list[int | None], seed: int, scale: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(counts), 25, generator=random) * scale
    expected = logits.double() - logits.double().exp().sum(dim=-1, keepdim=True).log()
    chosen = torch.randint(25, (len(counts),), generator=random).tolist()
    kept = logprobs.distributions(logits, sequences(counts))
    logits.fill_(0)  # what comes after does not count
    reports = [TokenLogprobs()] * len(counts) if kept is None else kept.report(chosen)
    for count, token, report, row in zip(counts, chosen, reports, expected, strict=True):
        if count is None:
            assert report == TokenLogprobs()
            continue
        order = sorted(range(25), key=lambda each, row=row: -row[each])[:count]  # type: ignore[misc]
        assert [each for each, _ in report.top] == order
        for each, value in [(token, report.logprob), *report.top]:
            assert value is not None
            assert abs(value - float(row[each])) < 1e-5 * max(1.0, abs(value))


def test_nothing_is_computed_when_no_row_asks() -> None:
    assert logprobs.distributions(torch.zeros(2, 5), sequences([None, None])) is None
