"""The whole engine on a model of windows: guesses, prompts' log-probabilities, cancellation and failures leave nothing
behind and change nothing."""

from collections.abc import Mapping

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import SamplingParams, Sequence
from service.engine.engine import Engine
from service.scaling.policy import RopeWish
from service.scheduler.scheduler import Scheduler
from tests.fakes import EngineUnderTest
from tests.service.growing import POLICY
from tests.service.windowed import WindowedRunner, Windows

PERIOD = 5


class QuotingRunner(WindowedRunner):
    """Says again what was said a period ago; now and then something else."""

    def forward(self, step: Mapping[Sequence, int]) -> torch.Tensor:
        logits = super().forward(step)
        places = [
            (sequence, sequence.num_computed + place)
            for sequence, tokens in step.items()
            for place in sequence.logits_wanted(tokens)
        ]
        for row, (sequence, place) in enumerate(places):
            if place >= PERIOD and place % 11:
                logits[row] = 0.0
                logits[row, sequence.tokens(0, place + 1)[-PERIOD]] = 10.0
        return logits


def engine_of(windows: Windows, num_pages: int, chunk: int, max_draft: int) -> EngineUnderTest:
    under_test = EngineUnderTest(num_pages, policy=POLICY, max_draft=max_draft)
    scheduler = Scheduler(under_test.pages, max_running=4, max_batch_tokens=chunk, windows=windows)
    under_test.scheduler = scheduler
    under_test.engine = Engine(
        *(QuotingRunner(num_pages, windows), scheduler, under_test.new_text_stream, under_test.metrics),
        page_bytes=1,
        max_draft=max_draft,
        max_rows_with_drafts=16,
    )
    return under_test


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 25),
        st.integers(1, 15),
        st.sampled_from([None, RopeWish(factor=4.0)]),
        st.sampled_from([None, None, 0]),
        st.none() | st.integers(0, 12),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=80)
@given(
    windows=st.sampled_from([(None, 6), (4,), (None, 3, 9)]),
    requests=REQUESTS,
    chunk=st.integers(4, 20),
    spare_pages=st.integers(0, 20),
)
def test_with_guesses_and_whatever_is_cancelled_the_answers_are_the_same(
    windows: Windows,
    requests: list[tuple[int, int, RopeWish | None, int | None, int | None]],
    chunk: int,
    spare_pages: int,
) -> None:
    answers = []
    for max_draft in (0, 4):
        under_test = engine_of(windows, 10 * len(windows) + spare_pages, chunk, max_draft)
        sequences = {}
        for number, (length, count, wish, told, cancelled) in enumerate(requests):
            prompt = (list(range(40, 40 + PERIOD)) * 5)[:length]
            sampling = SamplingParams(count, temperature=0.0, prompt_logprobs=told)
            sequence = under_test.sequence(str(number), prompt, sampling, wish)
            sequences[sequence] = cancelled
            under_test.engine.add(sequence)
        for now in range(13):
            for sequence, cancelled in sequences.items():
                if cancelled == now:
                    under_test.engine.cancel(sequence)
            under_test.engine.step()
            under_test.pages.check()
        under_test.run()
        assert under_test.pages.num_used == 0
        assert [len(under_test.ends(sequence.request_id)) for sequence in sequences] == [1] * len(sequences)
        answers.append({sequence.request_id: sequence.output for sequence in sequences})
    for number, (_, count, _, _, cancelled) in enumerate(requests):
        one, other = (answer[str(number)] for answer in answers)
        both = min(len(one), len(other))
        assert one[:both] == other[:both]
        assert cancelled is not None or len(one) == len(other) == count


def test_guesses_are_made_and_accepted() -> None:
    under_test = engine_of((None, 6), 40, 20, 4)
    sampling = SamplingParams(20, temperature=0.0)
    under_test.engine.add(under_test.sequence("a", list(range(40, 45)) * 3, sampling, RopeWish(factor=4.0)))
    under_test.run()
    accepted = under_test.metrics.registry.get_sample_value("ropewalk_spec_decode_num_accepted_tokens_total")
    assert accepted is not None
    assert accepted > 3
    assert under_test.metrics.registry.get_sample_value("ropewalk_kv_cache_tokens") == 40 // 2 * 4
