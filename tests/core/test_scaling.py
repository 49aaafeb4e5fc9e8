import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops as flax_ops

import fp8flax as fp8
from fp8flax._core import scaling
from fp8flax._core.formats import fp8_max
from tests import reference

pytestmark = pytest.mark.optimized

AMAXES = [3.0, 1e-30, 1e30, 0.1, 448.0, 3.4e38, 57344.0, 1.17e-38]
SUBNORMAL = [1e-45, 1e-40, 1.17e-38]


@pytest.mark.parametrize("dtype", list(reference.MAX))
@pytest.mark.parametrize("amax", [a for a in AMAXES if a > 1e-35])
@pytest.mark.parametrize("margin", [0, 1, 3])
def test_scale_is_flax_to_the_bit_and_the_quotient_within_an_ulp(dtype, amax, margin):
    largest = fp8_max(getattr(jnp, dtype))
    scale = fp8.compute_scale(jnp.float32(amax), jnp.ones((1,)), largest, margin)
    assert scale.shape == (1,)
    assert scale.dtype == jnp.float32
    flax_scale = flax_ops.compute_scale(jnp.float32(amax), jnp.ones((1,)), jnp.float32(largest), margin)
    np.testing.assert_array_equal(scale, flax_scale)
    np.testing.assert_array_equal(scale, reference.next_scale([amax], np.ones(1), dtype, margin))
    exact = np.float64(np.float32(amax)) * 2.0**margin / largest
    np.testing.assert_allclose(scale, exact, rtol=2.0**-23)


def test_a_margin_holds_for_the_smallest_amaxes():
    """57344 / amax alone would overflow float32."""
    scale = fp8.compute_scale(jnp.float32(1e-34), jnp.float32(1), 57344.0, 16)
    np.testing.assert_allclose(scale, 1e-34 * 2.0**16 / 57344, rtol=1e-6)


@pytest.mark.parametrize("amax", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize(
    ("old", "kept"), [(0.37, 0.37), (0.0, 1.0), (np.nan, 1.0), (np.inf, 1.0), (-2.0, 1.0)]
)
def test_an_unusable_amax_keeps_the_scale(amax, old, kept):
    scale = fp8.compute_scale(jnp.float32(amax), jnp.full((1,), old, jnp.float32), 448.0)
    np.testing.assert_array_equal(scale, np.float32([kept]))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("amax", SUBNORMAL)
def test_a_subnormal_amax_counts_as_zero(amax, wrap):
    @wrap
    def results(amax):
        exponents = [scaling.scale_exponent(amax, 448.0, rounding) for rounding in ("up", "floor")]
        return [
            *exponents,
            fp8.compute_scale(amax, jnp.float32(0.5), 448.0),
            *(scaling.current_scale(amax, 448.0, power_2=power_2) for power_2 in (False, True)),
        ]

    assert results(jnp.float32(amax)) == [0, 0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("amax", AMAXES)
@pytest.mark.parametrize("margin", [0, 10, 120])
def test_the_scale_is_a_normal_number_and_the_amax_survives(amax, margin):
    # Flax's formula gives 0 for the smallest of these, and with it NaN for every value.
    scale = fp8.compute_scale(jnp.float32(amax), jnp.ones((1,)), 448.0, margin)
    assert np.finfo(np.float32).tiny <= scale[0] < np.inf
    back = fp8.qdq(jnp.float32([amax]), jnp.float8_e4m3fn, scale, jnp.float32)
    assert np.isfinite(back).all()
    if margin == 0 and amax > 1e-35:
        np.testing.assert_allclose(back, [amax], rtol=1 / 16)


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_history_rolls_like_flax(length):
    ours = theirs = expected = jnp.zeros((length,))
    for step in range(2 * length + 1):
        x = jnp.array([[0.5, -(step + 1.0)]])
        ours = fp8.compute_amax_history(x, ours)
        theirs = flax_ops.compute_amax_history(x, theirs)
        expected = reference.next_history(x, expected)
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(ours, expected)
    assert ours[0] == 2 * length + 1


def test_a_python_number_enters_the_history():
    np.testing.assert_array_equal(fp8.compute_amax_history(-3.0, jnp.array([2.0, 9.0])), [3.0, 2.0])


@pytest.mark.parametrize("x", [[np.nan, 1.0], [np.inf], [-np.inf, 2.0], []], ids=str)
def test_unusable_data_leave_the_history(x):
    history = jnp.array([2.0, 9.0, 5.0])
    np.testing.assert_array_equal(fp8.compute_amax_history(jnp.float32(x), history), history)


def test_an_inf_in_a_history_lasts_for_one_step():
    history = fp8.compute_amax_history(jnp.float32([3.0]), jnp.array([np.inf, 2.0, 1.0]))
    np.testing.assert_array_equal(history, [3.0, 1.0, 0.0])


TINY, HUGE = 2.0**-126, float(np.finfo(np.float32).max)


def numbers(rng, lowest, highest, size):
    """Float32 numbers of every magnitude between two powers of two."""
    return (2.0 ** rng.uniform(lowest, highest, size)).astype(np.float32)


def test_scales_are_applied_in_range():
    """All that is in the range of float32 is right, and what was without care has the same bits."""
    rng, size = np.random.default_rng(0), 300_000
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
