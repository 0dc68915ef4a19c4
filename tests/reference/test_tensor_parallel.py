"""Tiny models that are split over two processes, against the same models in one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from model_patches.errors import UnsupportedModelError
from model_patches.tensor_parallel import check_tensor_parallel
from service.scaling.policy import RopeWish
from tests.reference.growing import random_tokens, tiny
from tests.reference.harness import RealEngine
from tests.reference.splitting import split_engine
from tests.reference.supported import FAMILIES, SCALED

MODELS = {**FAMILIES, **SCALED}
ALWAYS = ("llama",)
GATHERED = ("phi3", "olmo", "deepseek")
"""Families whose plan gathers queries, keys and values again: each process keeps all heads."""


def splits(config: Any) -> bool:
    try:
        check_tensor_parallel(config.to_dict(), 2)
    except UnsupportedModelError:
        return False
    return True


def load(engine: RealEngine) -> None:
    """Run requests of every scheme that the model allows: below, beyond and grown across the native length in one
    batch; then two that begin as others did."""
    for number, scheme in enumerate(engine.policy.schemes):
        wish, growing = RopeWish(scheme=scheme), RopeWish(scheme=scheme, growth="rerotate")
        if scheme == "default" or engine.runner.model.geometry.is_scaled:
            growing = wish
        longest = engine.policy.max_length if scheme != "default" else engine.policy.native_length
        engine.add(f"{scheme} below", random_tokens(9, number), 20, wish)
        engine.add(f"{scheme} beyond", random_tokens(longest - 100 if longest > 120 else 40, 20 + number), 10, wish)
        engine.add(f"{scheme} grown", random_tokens(40, 40 + number), min(70, longest - 40), growing)
    engine.run()
    for name, first in [(name, sequence) for name, sequence in engine.sequences.items() if name.endswith("beyond")][:2]:
        engine.add(f"{name} again", [*first.prompt, 1, 2, 3], 6, RopeWish(scheme=name.split()[0]))
    engine.run()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.long])
        for name, config in MODELS.items()
        if splits(config)
    ],
)
def test_a_split_model_computes_what_it_computes_in_one_process(family: str, tmp_path: Path) -> None:
    with split_engine(MODELS[family], tmp_path, max_batch_tokens=96, max_running=16) as split:
        whole = RealEngine(tiny(MODELS[family]), split.policy, max_batch_tokens=96, max_running=16, fuse=False)
        kept, all_heads = (engine.runner.layers[0].keys.shape[2] for engine in (split, whole))
        assert kept == (all_heads if family.startswith(GATHERED) else all_heads // 2)
        load(whole)
        load(split)
        for name, sequence in whole.sequences.items():
            other = split.sequences[name]
            assert torch.allclose(split.logits(name), whole.logits(name), atol=1e-4, rtol=0), name
            assert other.output == sequence.output, name
            assert (other.num_rerotations, other.num_prefix_tokens) == (
                sequence.num_rerotations,
                sequence.num_prefix_tokens,
            )
        if not split.runner.model.geometry.is_scaled:
            assert max(sequence.num_rerotations for sequence in split.sequences.values()) >= 3
        assert max(sequence.num_prefix_tokens or 0 for sequence in split.sequences.values()) > 0
