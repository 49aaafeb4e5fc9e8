"""Amaxes and histories beside NumPy, and scales beside Flax's rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops as flax_ops

import fp8flax as fp8
from fp8flax._core import scaling
from fp8flax._core.formats import fp8_max
from tests import reference
from tests.cases import normal

pytestmark = pytest.mark.optimized

AMAXES = np.float32([3.0, 1e-30, 1e30, 0.1, 448.0, 3.4e38, 57344.0, 1.17e-38])
SUBNORMAL = np.float32([1e-45, 1e-40, 1.17e-38])


TINY, HUGE = 2.0**-126, float(np.finfo(np.float32).max)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("special", "dtype"),
    [(0.0, jnp.float32), (-np.inf, jnp.float32), (np.nan, jnp.float32), (np.nan, jnp.bfloat16)],
    ids=str,
)
def test_the_amax(special, dtype):
    """It is NumPy's maximum, with inf for a NaN, and -inf for what is empty or does not count."""
    x = np.array(normal(0, 3, 4, 5))
    x.flat[::7], x.flat[::5] = 1e30, -1e-30
    x.flat[3:5] = -3e38, special
    x = jnp.asarray(x, dtype)
    wide = np.asarray(x, np.float32)
    expected = np.max(np.where(np.isnan(wide), np.inf, np.abs(wide)))
    for found in (scaling.delayed_amax(x), jax.jit(scaling.delayed_amax)(x)):
        assert found.dtype == dtype
        assert found.astype(jnp.float32) == expected
    assert scaling.delayed_amax(jnp.asarray(-2.0, dtype)) == 2
    where = jnp.arange(3)[:, None, None] > 0
    assert scaling.delayed_amax(x, where).astype(jnp.float32) == np.max(np.abs(wide[1:]))
    assert scaling.delayed_amax(x, where & False) == scaling.delayed_amax(x[:0]) == -np.inf


@pytest.mark.parametrize(("x", "expected"), [(1e39, HUGE), (-1e300, HUGE), (-3.0, 3.0), (-np.inf, np.inf)])
def test_an_amax_beyond_float32_is_the_largest_of_float32(x, expected):
    """An inf in float64 stays one: it would be a bad value in the data."""
    with jax.enable_x64(True):
        assert scaling.delayed_amax(jnp.float64([1, x, 2])) == expected


@pytest.mark.parametrize(
    ("dtype", "margin"),
    [*((dtype, 0) for dtype in reference.MAX), ("float8_e4m3fn", 1), ("float8_e5m2", 3)],
)
def test_scale_is_flax_to_the_bit_and_the_quotient_within_an_ulp(dtype, margin):
    amaxes, largest = AMAXES[AMAXES > 1e-35], fp8_max(getattr(jnp, dtype))
    scale = fp8.compute_scale(amaxes, jnp.ones((1,)), largest, margin)
    assert scale.dtype == jnp.float32
    flax_scale = flax_ops.compute_scale(amaxes, jnp.ones(amaxes.shape), jnp.float32(largest), margin)
    np.testing.assert_array_equal(scale, flax_scale)
    expected = [reference.next_scale([amax], np.ones(1), dtype, margin)[0] for amax in amaxes]
    np.testing.assert_array_equal(scale, expected)
    np.testing.assert_allclose(scale, amaxes.astype(np.float64) * 2.0**margin / largest, rtol=2.0**-23)


def test_an_unusable_amax_keeps_the_scale():
    amaxes = jnp.float32([[0.0], [-1.0], [np.nan], [np.inf], [-np.inf]])
    scale = fp8.compute_scale(amaxes, jnp.float32([0.37, 0.0, np.nan, np.inf, -2.0]), 448.0)
    np.testing.assert_array_equal(scale, np.float32([[0.37, 1.0, 1.0, 1.0, 1.0]] * 5))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_subnormal_amax_counts_as_zero(wrap):
    @wrap
    def results(amax):
        powers = [scaling.amax_to_scale(amax, 448.0, rounding) for rounding in ("up", "floor")]
        return [*powers, *(fp8.compute_scale(amax, jnp.float32(old), 448.0) for old in (0.5, 1.0))]

    for found, expected in zip(results(SUBNORMAL), [1, 1, 0.5, 1.0], strict=True):
        np.testing.assert_array_equal(found, [expected] * 3)


@pytest.mark.parametrize("margin", [0, 120])
def test_the_scale_is_a_normal_number_and_the_amax_survives(margin):
    # Flax's formula gives 0 for the smallest of these, and with it NaN for every value.
    scale = np.asarray(fp8.compute_scale(AMAXES, jnp.ones((1,)), 448.0, margin))
    assert (scale >= np.finfo(np.float32).tiny).all()
    back = fp8.qdq(AMAXES, jnp.float8_e4m3fn, scale, jnp.float32)
    assert np.isfinite([scale, back]).all()
    if margin == 0:
        np.testing.assert_allclose(back[AMAXES > 1e-35], AMAXES[AMAXES > 1e-35], rtol=1 / 16)
    # 57344 / amax alone would overflow float32.
    scale = fp8.compute_scale(jnp.float32(1e-34), jnp.float32(1), 57344.0, 16)
    np.testing.assert_allclose(scale, 1e-34 * 2.0**16 / 57344, rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "history", "expected"),
    [
        (-3.0, [2.0, 9.0], [3.0, 2.0]),
        ([np.nan, 1.0], [2.0, 9.0, 5.0], [2.0, 9.0, 5.0]),
        ([], [2.0, 9.0, 5.0], [2.0, 9.0, 5.0]),
        # An inf that another library left in the history lasts for one step.
        ([3.0], [np.inf, 2.0, 1.0], [3.0, 1.0, 0.0]),
    ],
    ids=str,
)
def test_ugly_histories(x, history, expected):
    np.testing.assert_array_equal(fp8.compute_amax_history(x, jnp.array(history)), expected)


def numbers(rng, lowest, highest, size):
    """Float32 numbers of every magnitude between two powers of two."""
    return (2.0 ** rng.uniform(lowest, highest, size)).astype(np.float32)


def test_scales_are_applied_in_range():
    """All that is in the range of float32 is right, and what was without care has the same bits."""
    rng, size = np.random.default_rng(0), 100_000
    total = numbers(rng, -32, 47, size) * rng.choice([-1, 1], size).astype(np.float32)
    lhs, rhs = (numbers(rng, -126, 127.99, size) for _ in range(2))
    actual = jax.jit(scaling.apply_scales)(total, lhs, rhs)
    plainly = np.asarray(jax.jit(lambda total, lhs, rhs: total * lhs * rhs)(total, lhs, rhs))
    exact = total.astype(np.float64) * lhs * rhs
    in_range = (np.abs(exact) >= TINY) & (np.abs(exact) <= 0.999999 * HUGE)
    np.testing.assert_allclose(actual[in_range], exact[in_range], rtol=2**-22)
    was_right = in_range & np.isfinite(plainly) & (plainly != 0)
    np.testing.assert_array_equal(actual[was_right], plainly[was_right])
    assert np.mean(was_right[in_range]) < 0.97
    too_large = np.abs(exact) > 1.000001 * HUGE
    np.testing.assert_array_equal(actual[too_large], np.sign(exact[too_large]) * np.inf)
    np.testing.assert_array_less(np.abs(actual[np.abs(exact) < TINY / 2]), 2 * TINY)


@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan])
def test_scales_that_are_no_numbers_stay_that(scale):
    totals, ones = np.float32([0, -3, np.inf]), np.float32(1)
    with np.errstate(invalid="ignore"):
        expected = totals * np.float32(scale)
    for scales in ((np.float32(scale), ones), (ones, np.float32(scale))):
        np.testing.assert_array_equal(scaling.apply_scales(totals, *scales), expected)
