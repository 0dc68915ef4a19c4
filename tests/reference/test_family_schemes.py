"""Tiny models of each supported architecture under each scheme: below and beyond their native length, grown across it
and out of the prefix cache, against a reference whose keys are never re-rotated."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from model_patches.kernels import ops
from model_patches.rope_config import read_geometry
from model_patches.schemes import known_schemes
from service.errors import WishError
from service.scaling.policy import Policy, RopeWish
from tests.reference.growing import assert_like_unrotated, random_tokens, tiny
from tests.reference.harness import RealEngine, reference_logits
from tests.reference.supported import FAMILIES, SCALED
from tests.reference.unrotated import UnrotatedCache

CORE = ("ntk", "yarn")


@pytest.fixture(autouse=True)
def attention_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that do not run fused attend by torch alone here, by the C++ operators in `test_families`."""
    monkeypatch.setattr(ops, "are_loaded", lambda: False)


def policy_of(config: Any) -> Policy:
    return Policy(read_geometry(config.to_dict(), "config"))


def every_scheme() -> Iterator[Any]:
    for name, config in FAMILIES.items():
        for scheme in policy_of(config).schemes:
            if scheme != "default":  # which never scales
                yield pytest.param(name, scheme, marks=[] if scheme in CORE else [pytest.mark.long])


@pytest.mark.parametrize(("family", "scheme"), [*every_scheme()])
def test_a_family_under_a_scheme(family: str, scheme: str) -> None:
    engine = RealEngine(tiny(FAMILIES[family]), policy_of(FAMILIES[family]), max_batch_tokens=48)
    wish, growing = RopeWish(scheme=scheme), RopeWish(scheme=scheme, growth="rerotate")
    below = engine.add("below", random_tokens(20, 1), 30, wish)
    beyond = engine.add("beyond", random_tokens(100, 2), 20, wish)
    grown = engine.add("grown", random_tokens(40, 3), 70, growing)
    engine.run()
    again = engine.add("again", [*beyond.prompt, 1, 2, 3], 10, wish)
    engine.run()
    assert [sequence.choice.mode for sequence in (below, beyond, grown)] == ["native", "static", "dynamic"]
    assert (grown.num_rerotations, again.num_prefix_tokens) == (3, 100)
    reference = tiny(FAMILIES[family])
    for sequence in (below, beyond, grown, again):
        assert_like_unrotated(engine, reference, sequence)


@pytest.mark.parametrize("family", [*FAMILIES, *SCALED])
def test_the_unrotated_reference_is_transformers_where_nothing_grows(family: str) -> None:
    config = {**FAMILIES, **SCALED}[family]
    reference, policy = tiny(config), policy_of(config)
    plan, tokens = policy.choose(60, 1).plan, random_tokens(50)
    cache = UnrotatedCache(reference, policy.geometry.layout)
    logits = torch.cat([cache.forward(tokens[:30], plan), *(cache.forward([token], plan) for token in tokens[30:])])
    assert torch.allclose(logits, reference_logits(reference, plan, tokens, 0), atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", [*FAMILIES, *SCALED])
def test_a_scheme_that_a_family_does_not_have_is_refused(family: str) -> None:
    policy = policy_of({**FAMILIES, **SCALED}[family])
    refused = known_schemes().keys() - set(policy.schemes)
    assert refused >= {"clex"}
    for scheme in refused:
        with pytest.raises(WishError, match=f"'{scheme}' is not available"):
            policy.choose(20, 10, RopeWish(scheme=scheme))
