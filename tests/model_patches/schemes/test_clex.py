"""CLEX solves its differential equation, is NTK where it is untrained, and says what it lacks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.schemes import SCHEMES, schemes_for

Array = NDArray[np.float64]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": lambda x: x / (1 + np.exp(-x)), "tanh": np.tanh}


def geometry(rotary_dim: int = 64, theta: float = 1e4, **options: Any) -> RopeGeometry:
    return RopeGeometry(rotary_dim, theta, 1024, 1024, "clex", parameters={"max_factor": 16, "act": "silu", **options})


def weights(rotary_dim: int = 64, seed: int = 0, size: float = 0.5, hidden: int | None = None) -> dict[str, Any]:
    """Random ones that move ln θ by up to 1 or so, as training does."""
    random, hidden = np.random.default_rng(seed), hidden or rotary_dim
    up = random.uniform(-1, 1, (rotary_dim // 2, hidden)) / np.sqrt(hidden)
    down = random.normal(0, size / hidden, (hidden, rotary_dim // 2))
    return {"ode_up_proj": up, "ode_down_proj": down}


def published_equation(rotary_dim: int, act: str, up: Array, down: Array) -> Callable[[float, Array], Array]:
    """The whole right side for z = ln frequency, out of powers of the base as the published code has it."""
    index = np.arange(0, rotary_dim, 2)

    def velocity(t: float, z: Array) -> Array:
        stretch = 2 * t - 1
        ntk = (1e4 * stretch ** (rotary_dim / (rotary_dim - 2))) ** (-index / rotary_dim)
        slope = (
            -2 * index / (rotary_dim - 2) / (1e4 ** (index / rotary_dim) * stretch ** (index / (rotary_dim - 2) + 1))
        )
        total: Array = ACTIVATIONS[act]((z + np.log(ntk)) @ up) @ down + slope / ntk
        return total

    return velocity


@pytest.mark.parametrize("act", sorted(ACTIVATIONS))
@pytest.mark.parametrize(
    ("rotary_dim", "theta", "end", "hidden"), [(8, 1e4, 2, 8), (64, 1e6, 16, 64), (128, 1e4, 7, 128), (64, 5e5, 5, 256)]
)
def test_agrees_with_an_independent_solver(act: str, rotary_dim: int, theta: float, end: int, hidden: int) -> None:
    trained = weights(rotary_dim, seed=end, hidden=hidden)
    clex = SCHEMES["clex"](geometry(rotary_dim, theta, act=act, **trained), 1.0, 1024 * end)
    velocity = published_equation(rotary_dim, act, trained["ode_up_proj"], trained["ode_down_proj"])
    start = -np.arange(0, rotary_dim, 2) / rotary_dim * np.log(theta)
    solution = solve_ivp(velocity, (1, end), start, method="DOP853", rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(clex.inv_freq, np.exp(solution.y[:, -1]), rtol=1e-8)
    assert clex.attention_factor == 1.0
    untrained = SCHEMES["ntk"](geometry(rotary_dim, theta), 2 * end - 1.0, 1)
    assert np.abs(np.log(clex.inv_freq / untrained.inv_freq)).max() > 0.05  # the network had something to say


def test_strong_weights_are_integrated_in_finer_steps() -> None:
    strong = weights(16, seed=3, size=40)
    clex = SCHEMES["clex"](geometry(16, act="tanh", **strong), 1.0, 4096)
    velocity = published_equation(16, "tanh", strong["ode_up_proj"], strong["ode_down_proj"])
    start = -np.arange(0, 16, 2) / 16 * np.log(1e4)
    solution = solve_ivp(velocity, (1, 4), start, method="DOP853", rtol=1e-13, atol=1e-12)
    np.testing.assert_allclose(clex.inv_freq, np.exp(solution.y[:, -1]), rtol=1e-6)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("t", [1, 2, 5, 16])
def test_untrained_it_is_ntk_at_twice_t_minus_one(t: int, theta: float) -> None:
    untrained = weights() | {"ode_down_proj": np.zeros((64, 32))}
    clex = SCHEMES["clex"](geometry(theta=theta, **untrained), 1.0, 1024 * t)
    ntk = SCHEMES["ntk"](geometry(theta=theta), 2.0 * t - 1, 1)
    np.testing.assert_allclose(clex.inv_freq, ntk.inv_freq, rtol=1e-12)
    assert clex.attention_factor == 1.0


@pytest.mark.parametrize(
    ("length", "t"), [(1, 1), (1023, 1), (1024, 1), (1025, 2), (2048, 2), (2049, 3), (4096, 4), (4097, 4), (99999, 4)]
)
@pytest.mark.parametrize("max_factor", [4, 4.0, 4.9])
def test_t_is_the_length_rounded_up_and_capped(length: int, t: int, max_factor: float) -> None:
    trained = geometry(max_factor=max_factor, **weights())
    found = SCHEMES["clex"](trained, 1.0, length).inv_freq
    assert found.tolist() == SCHEMES["clex"](trained, 1.0, 1024 * t).inv_freq.tolist()
    others = [SCHEMES["clex"](trained, 1.0, 1024 * other).inv_freq for other in range(1, 5) if other != t]
    assert all(found.tolist() != other.tolist() for other in others)


def test_at_the_models_own_length_it_is_the_default() -> None:
    trained = geometry(**weights())
    np.testing.assert_allclose(
        SCHEMES["clex"](trained, 1.0, 1024).inv_freq, SCHEMES["default"](trained, 1.0, 1024).inv_freq, rtol=1e-14
    )


def test_the_factor_plays_no_part() -> None:
    trained = geometry(**weights())
    one, eight = (SCHEMES["clex"](trained, factor, 3000) for factor in (1.0, 8.0))
    assert one.inv_freq.tolist() == eight.inv_freq.tolist()


def test_weights_are_taken_as_arrays_or_as_tuples() -> None:
    arrays = weights()
    tuples: dict[str, Any] = {name: tuple(map(tuple, values.tolist())) for name, values in arrays.items()}
    expected = SCHEMES["clex"](geometry(**arrays), 1.0, 3000).inv_freq
    assert SCHEMES["clex"](geometry(**tuples), 1.0, 3000).inv_freq.tolist() == expected.tolist()


@pytest.mark.parametrize("missing", ["ode_up_proj", "ode_down_proj"])
@pytest.mark.parametrize("length", [1024, 4096])
def test_a_config_alone_is_refused(missing: str, length: int) -> None:
    some = {name: values for name, values in weights().items() if name != missing}
    for without in (geometry(), geometry(**some)):
        with pytest.raises(UnsupportedModelError, match=r"'clex' needs the trained weights .* is not enough"):
            SCHEMES["clex"](without, 1.0, length)


def test_another_models_weights_are_not_used() -> None:
    plain = RopeGeometry(64, 1e4, 1024, 1024, "yarn", 4.0, {"max_factor": 16, "act": "silu", **weights()})
    assert "clex" not in schemes_for(plain)
    assert "clex" in schemes_for(geometry())
    with pytest.raises(UnsupportedModelError, match="trained weights"):
        SCHEMES["clex"](plain, 1.0, 2048)


def test_without_an_activation_it_is_silu() -> None:
    """The first release had no `act`, and SiLU."""
    named, unnamed = geometry(**weights()), geometry(**weights(), act=None)
    inv_freq = SCHEMES["clex"](unnamed, 1.0, 4096).inv_freq
    assert inv_freq.tolist() == SCHEMES["clex"](named, 1.0, 4096).inv_freq.tolist()
    assert inv_freq.tolist() != SCHEMES["clex"](geometry(**weights(), act="tanh"), 1.0, 4096).inv_freq.tolist()


def test_another_activation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'clex' has act silu or tanh, this model's is 'gelu'"):
        SCHEMES["clex"](geometry(**weights(), act="gelu"), 1.0, 2048)


def test_a_block_without_max_factor_is_refused() -> None:
    without = RopeGeometry(64, 1e4, 1024, 1024, "clex", parameters={"act": "silu", **weights()})
    with pytest.raises(UnsupportedModelError, match="'clex' needs max_factor"):
        SCHEMES["clex"](without, 1.0, 2048)


def test_weights_that_no_step_is_fine_enough_for_are_refused() -> None:
    wild = weights(4) | {"ode_down_proj": np.full((4, 2), 1e6)}
    with pytest.raises(UnsupportedModelError, match=r"cannot be integrated up to t = 2: .* not settled"):
        SCHEMES["clex"](geometry(4, **wild), 1.0, 2048)
