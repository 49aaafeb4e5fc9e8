"""The primitives: values against the reference, and the state that comes back as a gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops as flax_ops

import fp8flax as fp8
from tests import reference
from tests.cases import normal

pytestmark = pytest.mark.optimized

F32, E4M3, E5M2 = jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2


def eager(f):
    return f


def in_state(x, scale, history, q_dtype=E4M3):
    return jax.grad(lambda s, h: jnp.sum(fp8.in_qdq(F32, q_dtype, x, s, h)), (0, 1))(scale, history)


@pytest.mark.parametrize(
    ("function", "wrap", "state_dtype", "scale_shape", "q_dtype", "dtype"),
    [
        (fp8.in_qdq, eager, "float32", (), "float8_e4m3fn", jnp.float32),
        (fp8.in_qdq, jax.jit, fp8.fp32_max_grad, (1,), "float8_e5m2", jnp.bfloat16),
        (fp8.out_qdq, jax.jit, "float32", (1,), "float8_e4m3fnuz", jnp.float32),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_over_steps_it_is_the_reference(function, wrap, state_dtype, scale_shape, q_dtype, dtype):
    """One of the value and the cotangent is rounded, the other one passes as it is."""

    @wrap
    def step(x, scale, history, g):
        def f(x, *state):
            return function(F32, getattr(jnp, q_dtype), x, *(leaf.astype(state_dtype) for leaf in state))

        out, vjp = jax.vjp(f, x, scale, history)
        return (out, *vjp(g))

    scale, history = jnp.ones(scale_shape), jnp.zeros((3,))
    want_scale, want_history = np.ones(scale_shape, np.float32), np.zeros((3,), np.float32)
    for i in range(4):
        given = x, g = [(normal(k, 4, 7) * 10.0 ** (2 - i)).astype(dtype) for k in (i, 9)]
        *found, scale, history = step(x, scale, history, g)
        seen = int(function is fp8.out_qdq)
        want_scale = reference.next_scale(want_history, want_scale, q_dtype)
        want_history = reference.next_history(given[seen], want_history)
        np.testing.assert_array_equal(
            found[seen], reference.qdq(given[seen], q_dtype, want_scale.reshape(()))
        )
        np.testing.assert_array_equal(found[1 - seen], given[1 - seen])
        np.testing.assert_array_equal(scale, want_scale)
        np.testing.assert_array_equal(history, want_history)
        assert scale.dtype == history.dtype == jnp.float32


@pytest.mark.parametrize("function", [fp8.in_qdq, fp8.out_qdq])
def test_second_derivatives_are_straight_through(function):
    """Also where a value saturates, and where FP8 could not hold the derivative. Scales have none."""
    x, tangent = normal(0, 4, 7).at[0, 0].set(1e4), 1e6 * normal(1, 4, 7)

    def along_tangent(x, scale, history):
        def loss(x):
            y = function(F32, E4M3, x, scale, history)
            return jnp.sum(y * y)

        return jnp.vdot(jax.grad(loss)(x), tangent)

    state = jnp.full((1,), 2.0**-9), jnp.zeros((2,))
    dx, *of_state = jax.jit(jax.grad(along_tangent, (0, 1, 2)))(x, *state)
    np.testing.assert_array_equal(dx, 2 * tangent)
    for leaf in of_state:
        np.testing.assert_array_equal(leaf, 0.0)


def test_in_q_and_out_dq_are_flax():
    x, history = normal(0, 4, 7), jnp.array([3.0, 8.0])

    def there_and_back(ops, x, scale, history):
        q, new_scale = ops.in_q(F32, E4M3, x, scale, history)
        y = ops.out_dq(F32, new_scale, jnp.float32(2.0), q.astype(F32))
        return jnp.sum(y), (q, new_scale, y)

    with jax.numpy_rank_promotion("allow"):
        results = [
            jax.jit(jax.grad(partial(there_and_back, ops), (0, 1, 2), has_aux=True))(
                x, jnp.ones((1,)), history
            )
            for ops in (fp8, flax_ops)
        ]
    jax.tree.map(np.testing.assert_array_equal, *results)
    # Other names of Flax.
    assert fp8.quantize_dequantize is fp8.qdq
    assert fp8.Fp8DotGeneral is fp8.Fp8DirectDotGeneralOp


@pytest.mark.parametrize(
    "x", [np.zeros((2, 3)), np.full((1, 17), 1e30), np.float32(1e-30)], ids=["zeros", "1e30", "1e-30"]
)
def test_ugly_values_give_usable_state(x):
    scale, history = jnp.ones((1,)), jnp.zeros((2,))
    for _ in range(2):
        scale, history = in_state(jnp.float32(x), scale, history)
        assert np.isfinite(scale).all()
        assert (np.asarray(scale) > 0).all()
        assert np.isfinite(history).all()
    out = fp8.in_qdq(F32, E4M3, jnp.float32(x), scale, history)
    np.testing.assert_allclose(out, x, rtol=1 / 16)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_non_finite_value_leaves_the_history_and_reaches_the_result(bad):
    scale, history = jnp.full((1,), 0.5), jnp.array([3.0, 2.0])
    x = jnp.float32([1.0, bad, 1e38])
    new_scale, new_history = in_state(x, scale, history)
    np.testing.assert_array_equal(new_history, history)
    np.testing.assert_array_equal(new_scale, reference.next_scale([3.0, 2.0], [0.5], "float8_e4m3fn"))
    out = fp8.in_qdq(F32, E4M3, x, scale, history)
    assert np.isnan(out[1]) if np.isnan(bad) else abs(out[1]) >= 3.0
    # In a cotangent an Inf becomes a NaN, so that earlier layers and the optimizer see it.
    _, back = jax.vjp(lambda *args: fp8.out_qdq(F32, E5M2, *args), x, scale, history)
    dx, _, new_history = back(x)
    np.testing.assert_array_equal(np.isnan(dx), [False, True, False])
    np.testing.assert_array_equal(new_history, history)


@pytest.mark.parametrize("function", [fp8.in_qdq, fp8.out_qdq])
def test_examples_of_vmap_merge_by_maximum(function):
    def loss(scale, history):
        return jnp.sum(jax.vmap(lambda x: x * function(F32, E4M3, x, scale, history))(xs))

    xs = jnp.float32([1.0, 7.0, 5.0])
    _, history = jax.grad(loss, (0, 1))(jnp.ones((1,)), jnp.array([3.0, 2.0]))
    np.testing.assert_array_equal(history, [7.0, 3.0])


@pytest.mark.parametrize(("scale", "healed"), [(0.0, 1.0), (np.inf, 1.0), (np.nan, np.nan)])
def test_a_damaged_scale_heals_but_a_nan_stays(scale, healed):
    """A NaN marks a state that a training loop has damaged; the result is NaN, too."""
    scale, history = jnp.float32([scale]), jnp.zeros((2,))
    new_scale, new_history = in_state(jnp.float32([7.0]), scale, history)
    np.testing.assert_array_equal(new_scale, [healed])
    if np.isnan(healed):
        assert np.isnan(fp8.in_qdq(F32, E4M3, jnp.float32([7.0]), scale, history)).all()
    else:
        np.testing.assert_array_equal(new_history, [7.0, 0.0])


def test_uses_of_one_state_in_fp32_max_grad_merge_by_maximum():
    """A use of no data, or of a NaN, keeps the old history, which merges with that of the other use."""

    def f(scale, history, *xs):
        scale, history = scale.astype(fp8.fp32_max_grad), history.astype(fp8.fp32_max_grad)
        return sum(jnp.sum(fp8.in_qdq(F32, E4M3, x, scale, history)) for x in xs)

    def history_of(*xs):
        return jax.grad(f, 1)(jnp.ones((1,)), jnp.array([2.0, 1.0]), *xs)

    x, empty, nan = jnp.float32([5.0]), jnp.zeros((0,)), jnp.float32([jnp.nan])
    np.testing.assert_array_equal(history_of(x, 2 * x), [10.0, 2.0])
    np.testing.assert_array_equal(history_of(x, empty), [5.0, 2.0])
    np.testing.assert_array_equal(history_of(empty), [2.0, 1.0])
    np.testing.assert_array_equal(history_of(x, nan), [5.0, 2.0])
    np.testing.assert_array_equal(history_of(nan), [2.0, 1.0])


def test_under_debug_nans_and_x64():
    with jax.debug_nans(True):
        in_state(jnp.zeros((3,)), jnp.ones((1,)), jnp.zeros((2,)))
    with jax.enable_x64(True):
        x = jnp.array([1.0, -3.0], jnp.float64)
        scale, history = in_state(x, jnp.ones((1,), F32), jnp.zeros((2,), F32))
        assert scale.dtype == history.dtype == F32
        assert fp8.in_qdq(F32, E4M3, x, scale, history).dtype == jnp.float64


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((1, jnp.ones((1,)), jnp.zeros((2,))), TypeError, "inp .*int32"),
        ((1.0, jnp.ones((2,)), jnp.zeros((2,))), ValueError, "scale"),
        ((1.0, jnp.ones((1,)), jnp.zeros((0,))), ValueError, "length"),
        ((1.0, jnp.ones((1,)), jnp.zeros(())), ValueError, "amax_history"),
        ((1.0, jnp.ones((1,)), jnp.zeros((2,), jnp.bfloat16)), TypeError, "amax_history must be float32"),
    ],
)
def test_wrong_arguments(args, error, message):
    with pytest.raises(error, match=message):
        fp8.in_qdq(F32, E4M3, *args)
