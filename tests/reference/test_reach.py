"""A model that was really trained with ALiBi predicts no worse from twice the tokens that it was trained on."""

import pytest

from benchmarks.encodings import STEPS, TRAINED, refusal, texts, train


@pytest.mark.long
def test_alibi_at_twice_its_trained_length_is_within_five_percent_of_its_loss_there() -> None:
    tokens, passages = texts(30)
    trained = train("ALiBi", tokens, STEPS)
    plan = trained.policy.choose(1, 1).plan
    at_trained, at_twice = (trained.loss(plan, passages, length) for length in (TRAINED, 2 * TRAINED))
    assert at_trained < 2.6  # it has learned something: bytes by their frequency alone have 3.2
    assert at_twice <= 1.05 * at_trained


def test_learned_positions_are_refused_from_the_first_that_there_is_not() -> None:
    tokens, passages = texts(1)
    trained = train("learned", tokens, 1)
    assert "beyond the last there is none" in refusal(trained.policy)
    assert trained.loss(trained.policy.choose(1, 1).plan, passages, TRAINED) > 0
