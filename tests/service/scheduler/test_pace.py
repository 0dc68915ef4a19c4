"""How chunks of prompts follow what steps cost."""

import pytest

from service.scheduler.pace import Pace
from tests.service.scheduler.test_scheduler import Load


def settle(pace: Pace, token: float, step: float) -> int:
    """The chunk in the end, where each token costs so much and each step so much more."""
    for _ in range(50):
        tokens = pace.tokens
        pace.observe(tokens, step + token * tokens)
    return pace.tokens


@pytest.mark.parametrize(("token", "step", "expected"), [(0.001, 0.05, 200), (0.002, 0.05, 100), (0.001, 0.125, 125)])
def test_steps_settle_at_the_time_they_should_take(token: float, step: float, expected: int) -> None:
    assert settle(Pace(0.25, 512), token, step) == pytest.approx(expected, abs=2)


def test_a_cheap_token_takes_a_full_step_and_no_more() -> None:
    assert settle(Pace(0.25, 512), 0.00001, 0.0) == 512


def test_prompts_go_on_however_slow_a_step_is() -> None:
    assert settle(Pace(0.25, 512), 0.1, 3.0) == 64


def test_chunks_are_full_before_anything_is_known_and_where_no_time_is_set() -> None:
    assert Pace(0.25, 512).tokens == 512
    unlimited = Pace(0, 512)
    unlimited.observe(512, 100.0)
    assert unlimited.tokens == 512


def test_steps_with_hardly_a_prompt_token_say_nothing_of_what_one_costs() -> None:
    pace = Pace(0.25, 512)
    pace.observe(3, 1.0)
    assert pace.tokens == 512


@pytest.mark.parametrize("most", [16, 64, 512])
def test_one_slow_step_is_made_good(most: int) -> None:
    pace = Pace(0.25, most)
    pace.observe(pace.tokens, 5.0)
    assert settle(pace, 0.0001, 0.01) == most


def paced(tokens: int) -> Load:
    """A load whose steps may take so many prompt tokens beside requests that decode."""
    load = Load(decode_step_seconds=tokens, max_batch_tokens=64)
    load.scheduler.pace.observe(100, 100.0)
    assert load.scheduler.pace.tokens == tokens
    return load


def test_chunks_shrink_beside_a_request_that_decodes_and_not_otherwise() -> None:
    load = paced(20)
    load.add("early", prompt=2, max_tokens=3)
    assert load.step() == {"early": 2}
    load.add("long", prompt=80)
    assert load.step() == {"early": 1, "long": 20}
    assert load.step() == {"early": 1, "long": 20}
    assert load.step() == {"long": 40}


def test_what_one_prompt_leaves_of_a_shrunk_step_goes_to_the_next() -> None:
    load = paced(20)
    load.add("early", prompt=2, max_tokens=3)
    load.step()
    load.add("short", prompt=3)
    load.add("long", prompt=40)
    assert load.step() == {"early": 1, "short": 3, "long": 17}
