"""What is sent has its exact length, is new each time unless it is to be shared, and comes again with its seed."""

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.bench.errors import BenchError
from service.bench.lengths import parse_lengths
from service.bench.vocabulary import COMMON, Vocabulary
from service.bench.workload import Workload, poisson_arrivals
from tests.service.bench.fake_server import tokens_of

WORDS = tuple(COMMON.split()[:100])
VOCABULARY = Vocabulary("the", WORDS, tuple(range(1000, 1100)))


def workload(prompt: str, *, shared: int = 0, overhead: int = 0, as_text: bool = False, answer: str = "5") -> Workload:
    return Workload(VOCABULARY, parse_lengths(prompt), parse_lengths(answer), shared, overhead, as_text)


def tokens(prompt: str | list[int]) -> list[int] | list[str]:
    return prompt.split() if isinstance(prompt, str) else prompt


@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 5), st.integers(0, 2**32), st.booleans())
def test_lengths_are_exact(own: int, shared: int, overhead: int, seed: int, as_text: bool) -> None:
    low = max(shared, overhead + as_text) + own
    load = workload(f"{low}:{low + 30}", shared=shared, overhead=overhead, as_text=as_text)
    for job in load.jobs(4, seed):
        assert len(tokens(job.prompt)) + overhead == job.prompt_tokens
        assert low <= job.prompt_tokens <= low + 30


@pytest.mark.parametrize("as_text", [True, False])
def test_so_many_tokens_are_shared_and_the_rest_is_new(as_text: bool) -> None:
    jobs = workload("60", shared=40, overhead=4, as_text=as_text).jobs(6, seed=1)
    for one, other in itertools.combinations(jobs, 2):
        assert tokens(one.prompt)[:36] == tokens(other.prompt)[:36]
        assert tokens(one.prompt)[36:] != tokens(other.prompt)[36:]


def test_without_sharing_prompts_part_at_once() -> None:
    jobs = workload("60").jobs(6, seed=1)
    assert len({tuple(tokens(job.prompt)[:4]) for job in jobs}) == 6


def test_a_seed_gives_the_same_again_and_another_one_does_not() -> None:
    load = workload("20:90", answer="1:9")
    assert load.jobs(5, seed=7) == load.jobs(5, seed=7)
    assert load.jobs(5, seed=7) != load.jobs(5, seed=8)


def test_prompts_are_token_ids_or_words_of_the_vocabulary() -> None:
    (as_ids,), (as_text,) = workload("50").jobs(1, 0), workload("50", as_text=True).jobs(1, 0)
    assert set(as_ids.prompt) <= set(VOCABULARY.token_ids)
    assert isinstance(as_text.prompt, str)
    opener, *words = as_text.prompt.split()
    assert opener == "the"
    assert set(words) <= set(WORDS)
    assert len(tokens_of(as_text.prompt)) >= 50


def test_answers_have_lengths_of_their_own() -> None:
    drawn = {job.max_tokens for job in workload("9", answer="3:5").jobs(60, seed=1)}
    assert drawn == {3, 4, 5}


@pytest.mark.parametrize(
    ("prompt", "shared", "overhead", "as_text"),
    [("20", 20, 0, False), ("10:90", 20, 0, False), ("4", 0, 4, False), ("5", 0, 4, True), ("1", 0, 0, True)],
)
def test_a_prompt_without_a_token_of_its_own_is_refused(prompt: str, shared: int, overhead: int, as_text: bool) -> None:
    with pytest.raises(BenchError, match=f"--prompt-tokens {prompt}"):
        workload(prompt, shared=shared, overhead=overhead, as_text=as_text)


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = list(itertools.islice(poisson_arrivals(4.0, seed=1), 20_001))
    gaps = [later - sooner for sooner, later in itertools.pairwise(arrivals)]
    assert arrivals[0] == 0
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.03)  # that of an exponential is its mean
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)
    assert arrivals[:9] == list(itertools.islice(poisson_arrivals(4.0, seed=1), 9))
    assert arrivals[:9] != list(itertools.islice(poisson_arrivals(4.0, seed=2), 9))
