"""The policy of models that rotate nothing: one plan, its end, and what it refuses."""

import json
import re
from typing import Any

import pytest

from model_patches.encoding import FixedEncoding
from service.errors import ContextLengthError, WishError
from service.scaling.explain import explain
from service.scaling.fixed import FixedPolicy
from service.scaling.options import OptionError
from service.scaling.policy import RopeWish

LEARNED = FixedEncoding("learned", 1024)
SINUSOIDAL = FixedEncoding("sinusoidal", 1024)
ALIBI = FixedEncoding("alibi", 1024, (0.5, 0.25))
ALL = (LEARNED, SINUSOIDAL, ALIBI)


@pytest.mark.parametrize(("encoding", "longest"), [(LEARNED, 1024), (SINUSOIDAL, 1024), (ALIBI, 4096)])
def test_the_maximum_length_where_nothing_is_said(encoding: FixedEncoding, longest: int) -> None:
    policy = FixedPolicy(encoding)
    assert (policy.native_length, policy.max_length, policy.ladder) == (1024, longest, (1.0,))
    assert policy.schemes == (encoding.kind,)
    assert policy.choose(longest - 5, 5).max_tokens == 5
    assert policy.choose(longest - 5, None).max_tokens == 5
    for prompt, asked, param in ((longest - 5, 6, "max_tokens"), (longest, 1, "prompt"), (longest, None, "prompt")):
        with pytest.raises(ContextLengthError, match=f"the maximum length {'is ' * (param == 'prompt')}{longest}") as e:
            policy.choose(prompt, asked)
        assert e.value.param == param


def test_why_there_is_no_more_is_said_where_it_is_no_choice() -> None:
    with pytest.raises(
        ContextLengthError, match="an embedding was learned for each, and beyond the last there is none"
    ):
        FixedPolicy(LEARNED).choose(1000, 100)
    with pytest.raises(ContextLengthError, match=r"above the maximum length 4096$"):
        FixedPolicy(ALIBI).choose(4000, 100)


@pytest.mark.parametrize("encoding", ALL)
def test_every_request_has_the_same_plan_and_never_grows(encoding: FixedEncoding) -> None:
    policy = FixedPolicy(encoding)
    choices = [policy.choose(prompt, asked) for prompt, asked in ((1, 1), (500, 524), (1000, None))]
    assert len({choice.rungs for choice in choices}) == 1
    for choice in choices:
        assert (choice.mode, choice.growth, choice.prefix_reuse) == ("native", "stop", "same-plan")
        assert (choice.plan.scheme, choice.plan.factor, choice.plan.inv_freq) == (encoding.kind, 1.0, ())


def test_how_far_beyond_training_a_request_may_run_is_said() -> None:
    policy = FixedPolicy(ALIBI)
    said = policy.choose(1000, 24).reason
    assert said == "alibi positions, never scaled: prompt of 1000 tokens + 24 to generate fits the native length 1024"
    assert policy.choose(2000, 48).reason.endswith("+ up to 48 to generate reaches 2.00 times the native length 1024")
    beyond = FixedPolicy(SINUSOIDAL, max_length=3000).choose(1024, 512).reason
    assert beyond.endswith("reaches 1.50 times the native length 1024")


@pytest.mark.parametrize("encoding", [SINUSOIDAL, ALIBI])
def test_formulas_go_as_far_as_is_asked(encoding: FixedEncoding) -> None:
    policy = FixedPolicy(encoding, max_length=100_000)
    assert policy.max_length == policy.choose(1, None).plan.max_length == 100_000
    assert FixedPolicy(encoding, max_length=100).max_length == 100
    assert FixedPolicy(encoding, native_length=5000).native_length == 5000


def test_learned_positions_can_be_fewer_but_not_more() -> None:
    assert FixedPolicy(LEARNED, max_length=1024).max_length == 1024
    assert FixedPolicy(LEARNED, native_length=100).max_length == 100
    with pytest.raises(OptionError, match=r"the maximum length 1025 is above the native length 1024: .* learned") as e:
        FixedPolicy(LEARNED, max_length=1025)
    assert e.value.options == ("max_length",)
    with pytest.raises(OptionError, match="native length 1025 is above the 1024 positions that there are") as e:
        FixedPolicy(LEARNED, native_length=1025)
    assert e.value.options == ("native_length",)
    with pytest.raises(OptionError, match="the maximum length 101 is above the native length 100"):
        FixedPolicy(LEARNED, native_length=100, max_length=101)


@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("scheme", "yarn", "scheme yarn"),
        ("ladder", [2, 4], "ladder"),
        ("native_rope", "unscaled", "native_rope unscaled"),
        ("reserve", 100, "reserve 100"),
        ("growth", "rerotate", "growth rerotate"),
        ("growth_refresh_tokens", 4, "growth_refresh_tokens 4"),
        ("prefix_reuse", "rerotate", "prefix_reuse rerotate"),
        ("mode", [{"mode": "static"}], "mode"),
    ],
)
def test_options_of_scaling_are_refused(encoding: FixedEncoding, option: str, value: Any, shown: str) -> None:
    with pytest.raises(OptionError, match=f"^{shown} does not go with this model: .* {encoding.kind}: ") as e:
        FixedPolicy(encoding, **{option: value})
    assert e.value.options == (option,)


@pytest.mark.parametrize("encoding", ALL)
def test_options_that_say_what_is_so_anyway_are_fine(encoding: FixedEncoding) -> None:
    given: dict[str, Any] = {"scheme": encoding.kind, "growth": "stop", "prefix_reuse": "same-plan"}
    FixedPolicy(encoding, **given, growth_refresh_tokens=0, ladder=None, mode=[])


@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("scheme", "yarn", "scheme 'yarn'"),
        ("scheme", "default", "scheme 'default'"),
        ("mode", "static", "mode 'static'"),
        ("factor", 2.0, "factor 2"),
        ("growth", "rerotate", "growth 'rerotate'"),
        ("prefix_reuse", "rerotate", "prefix_reuse 'rerotate'"),
    ],
)
def test_wishes_for_scaling_are_refused_with_the_reason(
    encoding: FixedEncoding, name: str, value: Any, said: str
) -> None:
    policy = FixedPolicy(encoding)
    with pytest.raises(WishError, match=f"^{said} is not available; allowed: .*{re.escape(policy.why)}") as e:
        policy.choose(10, 10, RopeWish(**{name: value}))
    assert e.value.param == f"rope.{name}"


@pytest.mark.parametrize("encoding", ALL)
def test_wishes_for_what_is_so_anyway_are_granted(encoding: FixedEncoding) -> None:
    wish = RopeWish(encoding.kind, "native", 1.0, "stop", "same-plan")
    assert FixedPolicy(encoding).choose(10, 10, wish) == FixedPolicy(encoding).choose(10, 10)
    with pytest.raises(WishError, match="scheme is not a request's choice on this server; allowed: nothing"):
        FixedPolicy(encoding, requests_may_choose=False).choose(10, 10, wish)


@pytest.mark.parametrize("encoding", ALL)
def test_a_choice_told_in_full_has_no_frequencies(encoding: FixedEncoding) -> None:
    policy = FixedPolicy(encoding)
    told = json.loads(json.dumps(explain(policy.choose(100, 50), policy, 100)))
    rung = {"scheme": encoding.kind, "factor": 1.0, "max_length": policy.max_length}
    assert (told["pairs"], told["inv_freq"], told["local"]) == ([], [], None)
    assert (told["rungs"], told["ladder"], told["attention_factor"]) == ([rung], [rung], 1.0)
