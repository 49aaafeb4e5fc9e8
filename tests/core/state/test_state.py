"""The scale of a step and the next state of one tensor, beside NumPy and Flax's rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._compat.max_dtype import fp32_max_grad, of_floats
from fp8flax._core.scaling import push_amax
from fp8flax._core.state.meta import pack_meta, unpack_meta
from fp8flax._core.state.state import (
    ScalingState,
    calibrated_state,
    next_state,
    step_scale,
    step_scales,
    with_metas,
)
from fp8flax._core.state.tree import enter
from tests import reference

pytestmark = pytest.mark.optimized

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
DELAYED = fp8.DelayedQuantizer(dtype=E4M3)
OPTIONS = {
    "usual": DELAYED,
    "margin": dataclasses.replace(DELAYED, margin=2),
    "power": fp8.DelayedQuantizer(dtype=E5M2, use_power_2_scales=True, margin=1),
    "newest": dataclasses.replace(DELAYED, amax_compute_algo="most_recent"),
}


def flax_scales(amaxes, dtype, length):
    history, scales = np.zeros((length,), np.float32), []
    for amax in amaxes:
        scales.append(reference.next_scale(history, np.ones((1,)), dtype)[0])
        history = reference.next_history(np.float32([amax]), history)
    return np.float32(scales)


def test_the_numbers_of_metas_of_stacked_layers():
    numbers = jnp.float32([[[1.0], [2.0]], [[np.nan], [3.0]], [[np.inf], [-np.inf]]])
    np.testing.assert_array_equal(unpack_meta(pack_meta(*numbers)), numbers)


@pytest.mark.usefixtures("stacking")
@pytest.mark.parametrize(("dtype", "length"), [(E4M3, 1), (E4M3, 17), (E4M3, 1024), (E5M2, 17)])
def test_the_scales_are_flax_to_the_bit(dtype, length):
    """From the history, and from its meta, which is computed together with that of another history."""
    amaxes = np.exp(np.random.default_rng(length).standard_normal(40))
    amaxes[[7, 30]] = 0.0
    amaxes[11] *= 20
    quantizer = fp8.DelayedQuantizer(dtype=dtype)

    @jax.jit
    def both(history):
        states = [ScalingState(jnp.ones((1,)), h) for h in (jnp.flip(history), history)]
        return step_scale(quantizer, states[1]), step_scales([quantizer], with_metas(states)[1:])[0]

    history, scales = jnp.zeros((length,)), []
    for amax in amaxes:
        scales.append(both(history))
        history = push_amax(jnp.float32(amax), history)
    for found in np.float32(scales).T:
        np.testing.assert_array_equal(found, flax_scales(amaxes, quantizer.dtype.name, length))


@pytest.mark.parametrize(
    ("amax", "stack"), [(3.0, ()), (0.0, ()), (1e-40, ()), (np.inf, ()), (-np.inf, (2,))]
)
def test_next_state(amax, stack):
    """An amax of inf stands for a NaN or an Inf in the data, and -inf for empty data."""
    history = np.broadcast_to(np.float32([2.0, 5.0, 1.0]), (*stack, 3))
    pushed = np.broadcast_to(np.float32([amax, 1.0, 2.0]), history.shape)
    scale, new_scale, amaxes = (np.full((*stack, 1), x, np.float32) for x in (0.5, 0.25, amax))
    new = next_state(ScalingState(*map(jnp.asarray, (scale, history))), new_scale, jnp.asarray(amaxes))
    np.testing.assert_array_equal(new.scale, new_scale)
    np.testing.assert_array_equal(new.amax_history, pushed if np.isfinite(amax) else history)


@pytest.mark.parametrize("form", ["float32", "max", "entered"])
def test_the_gradient_of_a_state_is_its_next_value(form):
    """However it enters a gradient, and for every option: the amax is the cotangent of the scale."""
    scales = {"usual": 5 / 448, "margin": 4 * 5 / 448, "power": 2.0**-12, "newest": 2 / 448}
    cases = [([2.0, 5.0, 1.0], scales[name], q) for name, q in OPTIONS.items()]
    cases += [([1e-40, 0.0, 0.0], 0.5, q) for q in OPTIONS.values()]  # a subnormal amax leaves no scale
    for history, expected, quantizer in cases:
        tree = {"x_scale": jnp.full((1,), 0.5), "x_amax_history": jnp.float32(history)}

        def scale(state, quantizer=quantizer):
            if form == "max":
                state = {name: of_floats(fp32_max_grad, x) for name, x in state.items()}
            return step_scales([quantizer], [ScalingState(state["x_scale"], state["x_amax_history"])])[0]

        entered, leave = enter(tree) if form == "entered" else (tree, lambda new: new)
        used, back = jax.vjp(scale, entered)
        new = leave(*back(jnp.float32(7.0)))
        np.testing.assert_allclose(used, expected, rtol=1e-6)
        np.testing.assert_array_equal(new["x_scale"], [used])
        np.testing.assert_array_equal(new["x_amax_history"], np.float32([7.0, history[2], history[0]]))


@pytest.mark.parametrize("name", OPTIONS)
def test_calibrating_the_scale_follows_from_the_amax_of_this_step_alone(name):
    """Zeros have the scale 1, and a tensor without data keeps its state."""
    quantizer = OPTIONS[name]
    old = ScalingState(jnp.full((3, 1), 0.5), jnp.float32([[9.0, 0.0], [0.0, 0.0], [3.0, 1.0]]))
    new = calibrated_state(quantizer, old, jnp.float32([[7.0], [0.0], [-np.inf]]))
    np.testing.assert_array_equal(new.amax_history, [[7.0, 0.0], [0.0, 0.0], [3.0, 1.0]])
    options = quantizer.margin, quantizer.amax_compute_algo
    expected = reference.next_scale([7.0, 0.0], np.ones((1,)), quantizer.dtype.name, *options)
    expected = 2.0 ** np.ceil(np.log2(expected)) if quantizer.use_power_2_scales else expected
    np.testing.assert_array_equal(new.scale, [expected, [1.0], [0.5]])
