"""The scale of a step and the next state of one tensor, beside NumPy and Flax's rule."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._compat.max_dtype import fp32_max_grad, of_floats, to_digest
from fp8flax._core.scaling import push_amax
from fp8flax._core.state.batching import each_alike
from fp8flax._core.state.state import (
    ScalingState,
    calibrated_state,
    digest_of,
    kept_state,
    next_state,
    scale_of,
    step_scale,
)
from fp8flax._core.state.tree import enter, leave
from tests import reference
from tests.cases import cells

pytestmark = pytest.mark.optimized

F32, E4M3, E5M2 = jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
DELAYED = fp8.DelayedQuantizer(dtype=E4M3)
NAMES = {np.dtype(E4M3): "float8_e4m3fn", np.dtype(E5M2): "float8_e5m2"}


def scales_over_steps(amaxes, config, length=1024):
    """Returns the scale that each step uses: the same bits from the history and from its digest.

    The digest is computed together with that of another history.
    """

    @jax.jit
    def both(history):
        states = [ScalingState(jnp.ones((1,)), h) for h in (jnp.flip(history), history)]
        entered = states[1]._replace(scale=to_digest(*each_alike(digest_of, states)[1]))
        return scale_of(config, states[1]), scale_of(config, entered)

    history, scales = jnp.zeros((length,)), []
    for amax in amaxes:
        read, of_digest = both(history)
        np.testing.assert_array_equal(of_digest, read)
        scales.append(float(read))
        history = push_amax(jnp.float32(amax), history)
    return np.float32(scales)


def flax_scales(amaxes, q_dtype, length=1024):
    history, scale, scales = np.zeros((length,), np.float32), np.ones((1,), np.float32), []
    for amax in amaxes:
        scale = reference.next_scale(history, np.ones((1,)), q_dtype)
        scales.append(scale[0])
        history = reference.next_history(np.float32([amax]), history)
    return np.float32(scales)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_power_2_scales": True, "margin": 1}, {"amax_compute_algo": "most_recent"}],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 4])
def test_a_subnormal_amax_of_a_history_counts_as_zero(length, options, wrap):
    @wrap
    def of_history(history):
        return scale_of(dataclasses.replace(DELAYED, **options), ScalingState(jnp.full((1,), 0.3), history))

    for rest in (np.zeros(length - 1), [0.0] * (length - 2) + [8.0] if length > 1 else []):
        scale, expected = (of_history(jnp.float32([newest, *rest])) for newest in (1e-40, 0.0))
        np.testing.assert_array_equal(scale, expected)
        assert scale > 1e-3


@pytest.mark.usefixtures("stacking")
@pytest.mark.parametrize(
    ("q_dtype", "length"),
    cells(
        itertools.product([E4M3, E5M2], [1, 2, 3, 16, 17, 1024]),
        repeated=[*((E4M3, length) for length in (2, 3, 16)), *((E5M2, n) for n in (1, 2, 3, 16, 1024))],
    ),
)
def test_the_scales_are_flax_to_the_bit(q_dtype, length):
    amaxes = np.exp(np.random.default_rng(length).standard_normal(60))
    amaxes[[7, 30]] = 0.0
    amaxes[11] *= 20
    config = fp8.DelayedQuantizer(dtype=q_dtype)
    want = flax_scales(amaxes, NAMES[config.dtype], length)
    np.testing.assert_array_equal(scales_over_steps(amaxes, config, length), want)


def test_an_outlier_sets_the_scale_while_the_history_holds_it():
    amaxes = [1.0] * 20 + [1e6] + [1.0] * 30
    for length, remains in ((16, 16), (1024, 30)):
        scales = scales_over_steps(amaxes, DELAYED, length)
        np.testing.assert_array_equal(scales, flax_scales(amaxes, "float8_e4m3fn", length))
        assert sum(scales > 2000) == remains


def test_a_digest_has_the_old_scale_and_the_scales_of_this_step():
    histories = np.random.default_rng(0).lognormal(size=(3, 20)).astype(np.float32)
    scale = np.float32([[2.0], [3.0], [4.0]])
    found = digest_of(ScalingState(jnp.asarray(scale), jnp.asarray(histories)))
    np.testing.assert_array_equal(found[0], scale)
    for number, name in zip(found[1:], NAMES.values(), strict=True):
        expected = [reference.next_scale(h, s, name) for h, s in zip(histories, scale)]
        np.testing.assert_array_equal(number, expected)


@pytest.mark.parametrize(("amax", "stack"), [(3.0, ()), (0.0, ()), (np.inf, ()), (-np.inf, (2,))])
def test_next_state(amax, stack):
    """An amax of inf stands for a NaN or an Inf in the data, and -inf for empty data."""
    history = np.broadcast_to(np.float32([2.0, 5.0, 1.0]), (*stack, 3))
    pushed = np.broadcast_to(np.float32([amax, 1.0, 2.0]), history.shape)
    scale, new_scale, amaxes = (np.full((*stack, 1), x, np.float32) for x in (0.5, 0.25, amax))
    expected = pushed if np.isfinite(amax) else history
    new = next_state(ScalingState(*map(jnp.asarray, (scale, history))), new_scale, jnp.asarray(amaxes))
    np.testing.assert_array_equal(new.scale, new_scale)
    np.testing.assert_array_equal(new.amax_history, expected)


@pytest.mark.parametrize("form", ["float32", "max", "digest"])
def test_the_gradient_of_a_state_is_its_next_value(form):
    """However it enters a gradient, and for every option: the amax is the cotangent of the scale."""
    configs = {
        "usual": DELAYED,
        "margin": dataclasses.replace(DELAYED, margin=2),
        "power": fp8.DelayedQuantizer(dtype=E5M2, use_power_2_scales=True),
        "newest": dataclasses.replace(DELAYED, amax_compute_algo="most_recent"),
    }
    scale, history = jnp.full((1,), 0.5), jnp.float32([2.0, 5.0, 1.0])

    def scales(scale, history, config):
        state = ScalingState(scale, history)
        if form == "max":
            state = ScalingState(*(of_floats(fp32_max_grad, x) for x in state))
        return step_scale(config, state)

    for config in configs.values():
        if form == "digest":
            tree = {"x_scale": scale, "x_amax_history": history}

            def of_entered(entered, config=config):
                return scales(entered["x_scale"], entered["x_amax_history"], config)

            used, back = jax.vjp(of_entered, enter(tree))
            left = leave(tree, back(jnp.float32(7.0))[0])
            new = left["x_scale"], left["x_amax_history"]
        else:
            used, back = jax.vjp(lambda *args, config=config: scales(*args, config), scale, history)
            new = back(jnp.float32(7.0))
        np.testing.assert_array_equal(used, scale_of(config, ScalingState(scale, history)))
        for found, expected in zip(new, ([used], [7.0, 1.0, 2.0]), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_kept_state_checks_each_stacked_tensor():
    old = ScalingState(jnp.full((4, 1), 0.5), jnp.full((4, 2), 1.0))
    newest = jnp.float32([2.0, np.inf, 2.0, 2.0])
    new = ScalingState(
        jnp.float32([[0.25], [0.25], [0.0], [np.nan]]), jnp.stack([newest, jnp.full((4,), 2.0)], 1)
    )
    kept = kept_state(old, new)
    np.testing.assert_array_equal(kept.scale[:, 0], [0.25, 0.25, 0.5, 0.5])
    np.testing.assert_array_equal(kept.amax_history, [[2.0] * 2, [1.0] * 2, [1.0] * 2, [1.0] * 2])


@pytest.mark.parametrize("margin", [0, 2])
def test_calibrating_the_scale_follows_from_the_amax_of_this_step(margin):
    old = ScalingState(jnp.full((1,), 0.5), jnp.float32([2.0, 0.0]))
    config = dataclasses.replace(DELAYED, margin=margin)
    new = calibrated_state(config, old, jnp.float32([7.0]))
    np.testing.assert_array_equal(new.amax_history, [7.0, 2.0])
    expected = reference.next_scale([7.0, 2.0], np.ones((1,)), "float8_e4m3fn", margin)
    np.testing.assert_array_equal(new.scale, expected)


def test_calibrating_keeps_the_scale_for_zeros_and_the_state_without_data():
    old = ScalingState(jnp.float32([[0.5], [0.5]]), jnp.zeros((2, 2)).at[1, 0].set(3.0))
    new = calibrated_state(DELAYED, old, jnp.float32([[0.0], [-np.inf]]))
    np.testing.assert_array_equal(new.scale, old.scale)
    np.testing.assert_array_equal(new.amax_history, old.amax_history)
