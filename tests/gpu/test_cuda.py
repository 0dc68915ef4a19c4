"""The CUDA path on a real device; skipped without one."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from model_patches.attention import attend_sdpa, attend_varlen, page_size_for
from model_patches.recorded import CudaRecorder
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


SEVEN_BILLION = LlamaConfig(
    vocab_size=32768,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)


def model(dtype: torch.dtype, config: LlamaConfig = CONFIG) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()


def serving(dtype: torch.dtype = torch.bfloat16, config: LlamaConfig = CONFIG, **settings: Any) -> RealEngine:
    """With the pages that the device's attention needs."""
    dim = config.hidden_size // config.num_attention_heads
    page_size = page_size_for(torch.device("cuda"), dtype, dtype, dim, dim)
    policy = Policy(read_geometry(config.to_dict()))
    return RealEngine(model(dtype, config), policy, page_size=page_size, **settings)


def tokens(count: int, seed: int = 1) -> list[int]:
    drawn: list[int] = torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


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


def test_recorded_decode_steps_of_mixed_plans_give_the_logits_of_the_reference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    engine = serving(record=CudaRecorder(), max_running=8)
    assert any("recorded in" in line for line in caplog.messages), caplog.text
    lengths = [5, 100, 600, 900, 1500]
    for length in lengths:
        engine.add(f"{length}", tokens(length, length), 10 + length % 7)
    engine.run()
    reference = model(torch.bfloat16)
    for length in lengths:
        assert_like_reference(engine, reference, f"{length}", 0.2)


def test_a_sequence_that_grows_while_it_is_replayed_has_the_logits_of_one_that_is_not() -> None:
    engines = [serving(record=record, max_running=4) for record in (CudaRecorder(), None)]
    for engine in engines:
        growing = engine.add("growing", tokens(500), 300)  # beyond 512, 640 and 768
        engine.add("beside", tokens(30), 300)
        engine.run()
        assert growing.num_rerotations == 3
    recorded, launched = engines
    for name in ("growing", "beside"):
        assert recorded.sequences[name].output == launched.sequences[name].output
        torch.testing.assert_close(recorded.logits(name), launched.logits(name), rtol=0.02, atol=0.05)


def test_re_rotated_keys_on_the_device_give_the_logits_that_they_give_on_a_cpu() -> None:
    on_device = serving(torch.float32)
    on_cpu = RealEngine(model(torch.float32).cpu(), on_device.policy, fuse=False)
    for engine in (on_device, on_cpu):
        assert engine.add("growing", tokens(500), 150).sampling.max_tokens == 150
        engine.run()
        assert engine.sequences["growing"].num_rerotations == 2
    assert on_device.sequences["growing"].output == on_cpu.sequences["growing"].output
    torch.testing.assert_close(on_device.logits("growing").cpu(), on_cpu.logits("growing"), rtol=1e-3, atol=1e-3)


def test_a_cached_prefix_gives_the_logits_of_the_reference() -> None:
    engine = serving(record=CudaRecorder())
    prefix = tokens(700)
    engine.add("first", prefix, 8)
    engine.run()
    again = engine.add("again", prefix + tokens(50, 2), 8)
    engine.run()
    assert (again.num_prefix_tokens or 0) >= 512
    assert_like_reference(engine, model(torch.bfloat16), "again", 0.2)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 40e9, reason="needs 40 GB"
)
def test_a_decode_of_seven_billion_weights_is_replayed_as_it_is_launched() -> None:
    outputs = []
    for record in (CudaRecorder(), None):
        engine = serving(config=SEVEN_BILLION, record=record, num_pages=64, max_running=16, max_batch_tokens=4096)
        for row in range(16):
            engine.add(str(row), tokens(20 + 10 * row, row), 16)
        engine.run()
        outputs.append(engine)
        engine.model.cpu()  # makes room
    recorded, launched = (
        torch.stack([engine.logits(str(row))[1].cpu() for row in range(16)]) for engine in outputs
    )  # of the first step that decodes: later ones follow from what was chosen
    torch.testing.assert_close(recorded, launched, rtol=0.05, atol=0.1)
