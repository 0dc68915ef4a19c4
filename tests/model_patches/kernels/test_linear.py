"""Products with packed weights against float64, at every instruction set that this CPU has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_patches.kernels import ops
from model_patches.kernels.ops import Level

pytestmark = pytest.mark.usefixtures("operators")

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
LEVELS = st.sampled_from(list(Level))
COLUMNS, STEP = 32, 32


def rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [outputs, inputs] in panels, in memory that held something else before."""
    outputs, inputs = weight.shape
    shape = (rounded_up(outputs, COLUMNS) // COLUMNS, rounded_up(inputs, STEP) * COLUMNS)
    packed = torch.full(shape, torch.nan, dtype=weight.dtype)
    torch.ops.ropewalk.pack(weight, packed)
    return packed


def multiply(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, dtype: torch.dtype
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.ropewalk.packed_linear(x, packed, bias, outputs, dtype)
    return result


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=300)
@given(
    rows=st.integers(0, 70),
    outputs=st.integers(1, 140),
    inputs=st.integers(1, 140),
    dtype=DTYPES,
    rounded=DTYPES,
    strided=st.booleans(),
    with_bias=st.booleans(),
    level=LEVELS,
    threads=st.integers(1, 2),
    seed=st.integers(0, 9),
)
def test_a_product_is_that_of_float64_but_for_rounding(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    rounded: torch.dtype,
    strided: bool,
    with_bias: bool,
    level: Level,
    threads: int,
    seed: int,
) -> None:
    torch.set_num_threads(threads)
    ops.limit_level(level)
    x, weight = normal(rows, inputs, seed=seed).to(dtype), normal(outputs, inputs, seed=seed + 100).to(dtype)
    if strided:
        x, weight = x.T.contiguous().T, weight.repeat_interleave(2, dim=0)[::2]
    bias = normal(outputs, seed=seed + 200) if with_bias else None
    y = multiply(x, pack(weight), bias, outputs, rounded)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    summed = x.double().abs() @ weight.double().T.abs() + (0 if bias is None else bias.double().abs())
    bound = summed * torch.finfo(torch.float32).eps * (inputs + 2)
    if rounded == torch.bfloat16:
        bound += expected.abs() * torch.finfo(torch.bfloat16).eps
    assert y.dtype == rounded
    assert y.shape == (rows, outputs)
    assert torch.all((y.double() - expected).abs() <= bound)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 600),
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 100),
    dtype=DTYPES,
    level=LEVELS,
    seed=st.integers(0, 9),
)
def test_a_row_comes_out_bit_for_bit_alike_alone_and_among_any_number_on_any_number_of_threads(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, level: Level, seed: int
) -> None:
    ops.limit_level(level)
    x, packed = normal(rows, inputs, seed=seed).to(dtype), pack(normal(outputs, inputs, seed=seed + 100).to(dtype))
    torch.set_num_threads(2)
    whole = multiply(x, packed, None, outputs, torch.float32)
    torch.set_num_threads(1)
    for row in {0, rows // 3, rows // 2, rows - 1}:
        alone = multiply(x[row : row + 1], packed, None, outputs, torch.float32)
        assert torch.equal(alone[0], whole[row])
    for few in {min(rows, 7), min(rows, 20), min(rows, 33)}:
        assert torch.equal(multiply(x[:few], packed, None, outputs, torch.float32), whole[:few])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", list(Level))
def test_what_is_not_finite_stays_in_its_row_or_column(dtype: torch.dtype, level: Level) -> None:
    ops.limit_level(level)
    x, weight = normal(21, 50, seed=0).to(dtype), normal(45, 50, seed=1).to(dtype)
    x[3, 49], x[5, 0], weight[44, 7] = torch.nan, torch.inf, torch.nan
    y = multiply(x, pack(weight), None, 45, torch.bfloat16)
    spoilt = torch.zeros(21, 45, dtype=torch.bool)
    spoilt[3], spoilt[:, 44] = True, True
    assert torch.equal(y.isnan(), spoilt)
    spoilt[5] = True
    assert torch.equal(~y.isfinite(), spoilt)


@settings(deadline=None, max_examples=60)
@given(outputs=st.integers(1, 140), inputs=st.integers(1, 140), dtype=DTYPES, seed=st.integers(0, 9))
def test_rows_of_a_packed_weight_come_back_bit_for_bit(
    outputs: int, inputs: int, dtype: torch.dtype, seed: int
) -> None:
    weight = normal(outputs, inputs, seed=seed).to(dtype)
    ids = torch.randint(outputs, (outputs + 3,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(torch.ops.ropewalk.unpack_rows(pack(weight), ids, inputs), weight[ids])


@pytest.mark.parametrize("row", [-1, 64])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    packed = pack(normal(40, 8, seed=0))
    with pytest.raises(IndexError, match="out of range"):
        torch.ops.ropewalk.unpack_rows(packed, torch.tensor([0, row]), 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_of_packed_memory_is_a_weight_or_a_zero(dtype: torch.dtype) -> None:
    weight = normal(33, 5, seed=0).to(dtype)
    packed = pack(weight)
    assert torch.equal(packed[packed != 0].sort().values, weight.flatten().sort().values)


def test_two_weights_may_be_packed_panel_by_panel_in_turn() -> None:
    weights = [normal(70, 20, seed=seed) for seed in range(2)]
    packed = torch.full((3, 2, 32 * COLUMNS), torch.nan)
    for number, weight in enumerate(weights):
        torch.ops.ropewalk.pack(weight, packed[:, number])
    for number, weight in enumerate(weights):
        assert torch.equal(packed[:, number], pack(weight))


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, packed = normal(3, 40, seed=0), pack(normal(64, 40, seed=1))
    for rows, bias, outputs in ((x[:, :20], None, 64), (x, None, 65), (x, None, 32), (x, torch.zeros(63), 64)):
        with pytest.raises(RuntimeError):
            multiply(rows, packed, bias, outputs, torch.float32)
    with pytest.raises(RuntimeError):
        multiply(x.bfloat16(), packed, None, 64, torch.float32)
    with pytest.raises(RuntimeError, match="wrong shape"):
        torch.ops.ropewalk.pack(normal(64, 70, seed=0), packed)


@pytest.mark.parametrize("size", [1, 4096, 5_000_000])
def test_reserved_memory_is_as_large_as_asked_zero_and_ones_own(size: int) -> None:
    first, second = torch.ops.ropewalk.reserve(size), torch.ops.ropewalk.reserve(size)
    assert first.shape == (size,)
    assert not first.any()
    first.fill_(7)
    assert not second.any()
    view = first[size // 2 :]
    del first
    assert torch.all(view == 7)
