"""Tiny models that rotate nothing under the engine against transformers alone, in float32.

Their positions need no reference of their own: what transformers computes for one sequence is exact.
"""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import FalconConfig, MptConfig
from transformers.models.falcon import modeling_falcon

from model_patches.encoding import FixedEncoding, alibi_slopes
from model_patches.encoding_config import read_positions
from model_patches.errors import UnsupportedModelError
from model_patches.kernels import build, ops
from model_patches.patch import PatchedModel
from service.errors import ContextLengthError
from service.scaling.fixed import FixedPolicy
from tests.reference.growing import random_tokens, tiny
from tests.reference.harness import RealEngine, assert_like_stock
from tests.reference.supported import FALCON, FIXED, MPT

TOLERANCE = 1e-5  # ten times what is seen; the project's bound is 1e-4
LONGEST = 256
REQUESTS = {"one token": 1, "short": 3, "a page": 16, "more": 17, "native": 40, "beyond": 70, "far": 130, "end": 190}


LONG_ANSWERS = ("one token", "beyond", "end")


@pytest.fixture(autouse=True, scope="module")
def attention_by_operators() -> None:
    """Where there is a compiler."""
    build.load()


@pytest.fixture(params=["operators", "torch"])
def both_attentions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the C++ operators, and by torch alone."""
    if request.param == "torch":
        monkeypatch.setattr(ops, "are_loaded", lambda: False)


def encoding_of(config: Any) -> FixedEncoding:
    encoding = read_positions(config.to_dict())
    assert isinstance(encoding, FixedEncoding)
    return encoding


def engine_of(config: Any, **options: Any) -> RealEngine:
    return RealEngine(tiny(config), FixedPolicy(encoding_of(config), max_length=LONGEST), **options)


def reference_of(config: Any) -> Any:
    """Transformers' own model. MPT's code has biases for its trained length only, and Falcon's attention, when it is
    written out, adds them twice: once itself, once in the mask."""
    config = deepcopy(config)
    if config.model_type == "mpt":
        config.max_seq_len = LONGEST
    model = tiny(config)
    if config.model_type == "falcon":
        model.config._attn_implementation_internal = "sdpa"
    return model


@pytest.mark.usefixtures("both_attentions")
@pytest.mark.parametrize("family", FIXED)
def test_requests_of_all_lengths_in_one_batch_have_the_logits_that_each_has_alone(family: str) -> None:
    engine = engine_of(FIXED[family], max_batch_tokens=48)  # longer prompts are computed in chunks
    for seed, (name, length) in enumerate(REQUESTS.items()):
        engine.add(name, random_tokens(length, seed), 64 if name in LONG_ANSWERS else 9)
    engine.run()
    assert max(map(len, engine.runner.steps)) == len(REQUESTS)
    reference = reference_of(FIXED[family])
    for name in REQUESTS:
        assert_like_stock(engine, reference, name, TOLERANCE)


@pytest.mark.parametrize("family", FIXED)
def test_a_whole_prompt_and_a_cached_prefix_have_the_same_logits(family: str) -> None:
    engine = engine_of(FIXED[family])
    prompt = random_tokens(100)
    engine.add("whole", prompt, 8)
    engine.run()
    again = engine.add("again", [*prompt[:90], 1, 2, 3], 8)
    engine.run()
    assert again.num_prefix_tokens == 90
    assert engine.runner.steps[0] == {"whole": 100}
    reference = reference_of(FIXED[family])
    for name in ("whole", "again"):
        assert_like_stock(engine, reference, name, TOLERANCE)


@pytest.mark.parametrize("family", FIXED)
def test_a_request_ends_at_the_maximum_length_and_a_longer_one_is_refused(family: str) -> None:
    engine = engine_of(FIXED[family])
    sequence = engine.add("to the end", random_tokens(LONGEST - 3), 3)
    engine.run()
    assert len(sequence.output) == 3
    with pytest.raises(ContextLengthError, match=f"above the maximum length {LONGEST}"):
        engine.add("beyond", random_tokens(LONGEST - 3), 4)
    assert_like_stock(engine, reference_of(FIXED[family]), "to the end", TOLERANCE)


def compare(config: Any, reference: Any, lengths: list[int]) -> None:
    engine = engine_of(config, max_batch_tokens=48)
    for length in lengths:
        engine.add(f"{length}", random_tokens(length, length), 20)
    engine.run()
    for length in lengths:
        assert_like_stock(engine, reference, f"{length}", TOLERANCE)


@pytest.mark.parametrize("bias_max", [4, 16])
def test_mpts_largest_bias_is_that_of_the_config_which_transformers_does_not_read(bias_max: int) -> None:
    config = MptConfig(**MPT, attn_config={"alibi_bias_max": bias_max})
    reference = reference_of(config)
    build_biases = reference.base_model.build_mpt_alibi_tensor
    reference.base_model.build_mpt_alibi_tensor = lambda heads, length, device: build_biases(
        heads, length, bias_max, device
    )
    compare(config, reference, [5, 100])


def test_falcons_slopes_are_bfloat16_and_its_biases_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code rounds slope × position to bfloat16, so that a bias there is not one of a distance."""
    heads = 12

    def exact(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        slopes = torch.tensor(alibi_slopes(num_heads)).bfloat16().to(dtype)
        return slopes[:, None, None] * torch.arange(mask.shape[1])

    config = FalconConfig(**{**FALCON, "hidden_size": 96, "num_attention_heads": heads})
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", exact)
    compare(config, reference_of(config), [5, 100, 230])


def test_determinism_is_refused_as_it_needs_fused_layers() -> None:
    config = FIXED["bloom, 6 heads"]
    with pytest.raises(UnsupportedModelError, match="need decoder layers that run fused"):
        PatchedModel(tiny(config), encoding_of(config), deterministic=True)


class Squares(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects the shapes of tensors that have two dimensions of a given size."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = size
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and list(result.shape).count(self.size) > 1:
            self.seen.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("family", FIXED)
def test_nothing_of_queries_times_keys_is_built(family: str) -> None:
    if not ops.are_loaded():
        pytest.skip("without operators, attention itself is written out")
    engine = engine_of(FIXED[family])
    engine.add("long", random_tokens(251), 1)
    with Squares(251) as squares:
        engine.run()
    assert not squares.seen
