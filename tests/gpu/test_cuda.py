"""The CUDA path on a real device; skipped without one."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from model_patches.attention import attend_sdpa, attend_varlen, page_size_for
from model_patches.rope_config import read_geometry
from service.scaling.policy import Policy
from tests.model_patches.paged import attention_by_definition, random_batch
from tests.reference.harness import RealEngine, assert_like_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)


def model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager", dtype=dtype).cuda().eval()


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 3, 8)])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_attention_over_pages_of_mixed_lengths_is_that_of_the_definition(
    dtype: torch.dtype, window: int | None, sinks: torch.Tensor | None
) -> None:
    page_size = page_size_for(torch.device("cuda"), dtype, dtype, 64, 64)
    batch = random_batch(
        [(64, 64), (1, 700), (30, 1030), (1, 1)],
        heads=8,
        kv_heads=2,
        head_dim=64,
        page_size=page_size,
        dtype=dtype,
        device="cuda",
    )
    pages = batch.batch.layers[0]
    pages.write(batch.batch.slots, batch.key, batch.value)
    for pool in (pages.keys, pages.values):
        pool.data.nan_to_num_()  # as `allocate_pool` makes them on CUDA
    output = attend_varlen(batch.query, pages, batch.batch, 0.125, window, None if sinks is None else sinks.cuda())
    expected = attention_by_definition(batch, 0.125, window, sinks)
    torch.testing.assert_close(output.double().cpu(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 3, 8)])
@pytest.mark.parametrize("kept_as", [torch.int8, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_over_pages_of_another_type_is_that_of_the_definition(
    dtype: torch.dtype, kept_as: torch.dtype, sinks: torch.Tensor | None
) -> None:
    lengths = [(64, 64), (1, 700), (30, 1030), (1, 1)]
    batch = random_batch(lengths, heads=8, kv_heads=2, head_dim=64, page_size=16, kept_as=kept_as, device="cuda")
    pages = batch.batch.layers[0]
    pages.write(batch.batch.slots, batch.key, batch.value)
    given = None if sinks is None else sinks.cuda()
    output = attend_sdpa(batch.query.to(dtype), pages, batch.batch, 0.125, 300, given)
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    expected = attention_by_definition(batch, 0.125, 300, sinks)
    torch.testing.assert_close(output.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "kept_as", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-3),
        (torch.bfloat16, torch.bfloat16, 0.2),
        (torch.bfloat16, torch.int8, 0.3),
        (torch.float32, torch.int8, 0.3),
    ],
)
def test_mixed_plans_in_one_batch_give_each_request_the_logits_it_has_alone(
    dtype: torch.dtype, kept_as: torch.dtype, tolerance: float
) -> None:
    engine = RealEngine(
        model(dtype),
        Policy(read_geometry(CONFIG.to_dict())),
        page_size=page_size_for(torch.device("cuda"), dtype, kept_as, 64, 64),
        kv_dtype=kept_as,
    )
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 100, 600, 900, 1500]
    for length in lengths:
        engine.add(f"{length}", torch.randint(256, (length,), generator=generator).tolist(), 16)
    engine.run()
    reference = model(dtype)
    for length in lengths:
        assert_like_reference(engine, reference, f"{length}", tolerance)
