"""CLEX: frequencies that flow with the length, along a small trained neural network.

Knows the differential equation and how to integrate it. Does not know the network's weights: they belong to a model,
and are read from its files by `model_patches.loading.clex_weights`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.schemes.frequencies import Frequencies, geometric_series

Array = NDArray[np.float64]
Velocity = Callable[[float, Array], Array]

TIME_THETA = 1e4  # the base of the network's second input, which the published code leaves at this whatever b is
# How far two solutions, one with half the other's step, may be apart in ln θ. The finer one is then about 1/15 of that
# from the true solution, so that a frequency is good to 1e-10, and an angle at position 2^20 to 1e-4 rad.
TOLERANCE = 1e-9
FEWEST_STEPS, MOST_STEPS = 16, 4096  # in each unit of t


class Network(NamedTuple):
    """The trained part.

    Attributes:
        up: float64 [d / 2, hidden].
        activation: between the two projections, element by element.
        down: float64 [hidden, d / 2].
    """

    up: Array
    activation: Callable[[Array], Array]
    down: Array


def clex_frequencies(geometry: RopeGeometry, _factor: float, length: int) -> Frequencies:
    """exp z(t), m = 1, with z(1) = ln θ and dz/dt = −2·k/(2t−1) + act((z + ln ξ(t))·W_up)·W_down (CLEX, 2310.16450).

    t is the length in units of L, rounded up to a whole number, at least 1 and at most the option `max_factor`; L is
    `geometry.original_length` in tokens. The first term, with k_i = 2i/(d−2), is the path of NTK at s = 2t−1, so that
    is what a network whose W_down is zero gives. ξ(t) are NTK's frequencies at s = 2t−1 and base 10,000, whatever the
    model's own base. All this is as in the published code (DAMO-NLP-SG/CLEX), but for the integration: that one is in
    float32 with the block's fixed step `time_dt`, 0.01 by default, and ends some 3e-5 (relative, at t = 16) beside the
    solution for rounding alone, a step of 0.1 would add 2e-6. Here `time_dt` plays no part, see `integrate`.

    The options are those of the model's own clex block: `max_factor`, `act` ("silu" where it says nothing, or "tanh"),
    `ode_up_proj` [d/2, hidden] and `ode_down_proj` [hidden, d/2], which its config cannot hold. The factor asked for
    plays no part.

    Returns:
        inv_freq in radians per position, [d / 2]; attention factor 1.

    Raises:
        UnsupportedModelError: there are no weights or no `max_factor`, see `schemes_for`; another activation; a
            network too wild to integrate.
    """
    options = geometry.options("clex")
    network = _network(options)
    end = max(1, min(math.ceil(length / geometry.original_length), int(options["max_factor"])))
    pairs = np.arange(geometry.rotary_dim // 2)
    share = 2 * pairs / (geometry.rotary_dim - 2)  # k
    unscaled = geometric_series(geometry.theta, geometry.rotary_dim)
    start = np.log(unscaled)
    time_start = np.log(geometric_series(TIME_THETA, geometry.rotary_dim))

    def ntk_path(t: float) -> Array:
        return -share * math.log(2 * t - 1)

    # NTK's path is known, so only what the network adds to it is integrated: z(t) = ln θ − k·ln(2t−1) + drift(t).
    def velocity(t: float, drift: Array) -> Array:
        seen = start + drift + time_start + 2 * ntk_path(t)
        return network.activation(seen @ network.up) @ network.down

    drift = integrate(velocity, np.zeros(len(pairs)), end)
    return Frequencies(unscaled * np.exp(ntk_path(end) + drift), 1.0)  # at t = 1 the default's, bit for bit


def integrate(velocity: Velocity, start: Array, end: int) -> Array:
    """x(end) of dx/dt = velocity(t, x) with x(1) = start, by the classical Runge-Kutta method of order 4.

    The steps are halved until that changes nothing that matters (`TOLERANCE`): how fine they must be depends on the
    weights, which are a model's own.

    Raises:
        UnsupportedModelError: the solutions do not settle with `MOST_STEPS` in each unit of t.
    """
    steps = FEWEST_STEPS
    coarse = _runge_kutta(velocity, start, end, steps)
    while steps < MOST_STEPS:
        steps *= 2
        fine = _runge_kutta(velocity, start, end, steps)
        if np.all(np.abs(fine - coarse) <= TOLERANCE):
            return fine
        coarse = fine
    raise UnsupportedModelError(
        f"the weights of scheme 'clex' cannot be integrated up to t = {end}: the solution is not settled with "
        f"{MOST_STEPS} steps in each unit of t"
    )


def silu(x: Array) -> Array:
    """x·σ(x), without an overflow for numbers far below 0."""
    gate: Array = (1 + np.tanh(x / 2)) / 2
    return x * gate


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {"silu": silu, "tanh": np.tanh}


def _network(options: Mapping[str, Any]) -> Network:
    if "ode_up_proj" not in options or "ode_down_proj" not in options:
        raise UnsupportedModelError(
            "scheme 'clex' needs the trained weights ode_up_proj and ode_down_proj, which this model does not have; "
            "a config that asks for clex is not enough"
        )
    if "max_factor" not in options:
        raise UnsupportedModelError("scheme 'clex' needs max_factor, which this model's config does not have")
    name = options.get("act") or "silu"
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"scheme 'clex' has act {' or '.join(ACTIVATIONS)}, this model's is {name!r}")
    up, down = (np.asarray(options[key], dtype=np.float64) for key in ("ode_up_proj", "ode_down_proj"))
    return Network(up, ACTIVATIONS[name], down)


def _runge_kutta(velocity: Velocity, start: Array, end: int, steps: int) -> Array:
    x, h = start, 1 / steps
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows does not settle, and is refused for that
        for step in range((end - 1) * steps):
            t = 1 + step * h
            k1 = velocity(t, x)
            k2 = velocity(t + h / 2, x + h / 2 * k1)
            k3 = velocity(t + h / 2, x + h / 2 * k2)
            k4 = velocity(t + h, x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return x
