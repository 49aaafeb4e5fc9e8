"""The casts, bit by bit against NumPy and ml_dtypes."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import fp8flax as fp8
from tests import reference
from tests.cases import assert_same_bits, normal, ties

pytestmark = pytest.mark.optimized

DTYPES = list(reference.FP8)
ALL_BITS = np.arange(65536, dtype=np.uint16)
# 1 and powers of two, ordinary amax/448 values, and the far ends of what float32 scales can be.
SCALES = [1.0, 0.25, 0.37, 3.0 / 448.0, 7e-5, 1234.5, 1e30, 1e-30]
BF16, F32, F16 = ml_dtypes.bfloat16, np.float32, np.float16


@pytest.mark.parametrize(
    ("jit", "compute", "name", "source"),
    [
        *((True, F32, name, source) for name, source in zip(DTYPES, [BF16, F16, BF16, F16])),
        # In another dtype, and un-jitted, each operation is the same one, whatever the format.
        (True, BF16, DTYPES[0], BF16),
        (True, BF16, DTYPES[1], F16),
        (False, F32, DTYPES[0], BF16),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_all_16_bit_inputs(name, source, compute, jit):
    x = ALL_BITS.view(source)
    wrap = jax.jit if jit else lambda f: f
    quantize = wrap(lambda x, s: fp8.quantize(x, fp8_dtype, s, compute))
    roundtrip = wrap(lambda x, s: fp8.qdq(x, fp8_dtype, s, compute))
    fp8_dtype = getattr(jnp, name)
    for scale in map(np.float32, SCALES):
        assert_same_bits(quantize(x, scale), reference.quantize(x, name, scale, compute))
        assert_same_bits(roundtrip(x, scale), reference.qdq(x, name, scale, compute))


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_is_nearest_even_by_search(name):
    with np.errstate(invalid="ignore"):  # signalling NaNs among the bit patterns
        x = ALL_BITS.view(ml_dtypes.bfloat16).astype(np.float64)
    # XLA flushes float32 subnormals to zero, which is also where FP8 rounds them.
    x = x[np.isfinite(x)]
    codes = reference.finite_codes(name)
    midpoints = (np.sort(codes)[1:] + np.sort(codes)[:-1]) / 2
    x = np.concatenate([x, midpoints, np.nextafter(np.float32(midpoints), np.float32(np.inf))])
    q = fp8.quantize(jnp.float32(x), getattr(jnp, name), jnp.float32(1))
    np.testing.assert_array_equal(np.asarray(q).astype(np.float64), reference.nearest_code(x, name))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda v: v.__name__)
def test_no_way_to_compile_multiplies_by_the_reciprocal(dtype):
    x, scale = ties(0, 16, 32, dtype=dtype)
    expected = reference.quantize(x, "float8_e4m3fn", scale)
    scale = jnp.asarray(scale)
    quantize = partial(fp8.quantize, q_dtype=jnp.float8_e4m3fn)

    def in_scan(x, scale):
        return lax.scan(lambda _, each: (None, quantize(each[0], scale=each[1])), None, (x, scale))[1]

    each = jnp.broadcast_to(scale, 16)
    for actual in (
        quantize(x, scale=scale),
        jax.jit(quantize)(x, scale=scale),
        jax.jit(partial(quantize, scale=scale))(x),
        jax.jit(partial(quantize, x))(scale=scale),
        jax.jit(lambda x: quantize(x, scale=float(scale)))(x),
        jax.jit(lambda x, scale: (quantize(x, scale=scale), scale + 1))(x, scale)[0],
        jax.jit(quantize)(x, scale=each[:, None]),
        jax.jit(jax.vmap(lambda x, scale: quantize(x, scale=scale)))(x, each),
        jax.jit(in_scan)(x, each),
    ):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", DTYPES)
def test_any_float32(name):
    """Numbers of all magnitudes. XLA flushes what is below the normal range to zero."""
    x = np.random.default_rng(0).integers(0, 2**32, 5000, np.uint32).view(np.float32)
    for scale in np.float32([2.0**-60, 3.0 / 448.0, 2.0**60]):
        with np.errstate(all="ignore"):
            small = np.minimum(np.abs(x), np.abs(x / scale))
        of_range = x[~((small > 0) & (small < 1e-37))]
        dtype = getattr(jnp, name)
        assert_same_bits(fp8.quantize(of_range, dtype, scale), reference.quantize(of_range, name, scale))
        assert_same_bits(fp8.qdq(of_range, dtype, scale), reference.qdq(of_range, name, scale))


def test_scale_shapes():
    x = normal(0, 4, 6)
    by_scalar = fp8.quantize(x, jnp.float8_e4m3fn, jnp.float32(0.5))
    for shape in [(1,), (4, 1), (1, 6)]:
        assert_same_bits(fp8.quantize(x, jnp.float8_e4m3fn, jnp.full(shape, 0.5)), by_scalar)
    assert fp8.quantize(jnp.float32(2.0), jnp.float8_e4m3fn, jnp.full((1,), 0.5)).shape == ()
    for bad in [(6,), (2, 1), (1, 4, 6)]:
        with pytest.raises(ValueError, match="scale .*does not fit"):
            fp8.quantize(x, jnp.float8_e4m3fn, jnp.ones(bad))


def test_python_numbers_and_numpy_arrays():
    assert fp8.quantize(2.0, jnp.float8_e4m3fn, 0.5) == 4.0
    assert fp8.qdq(np.float64([2.0]), jnp.float8_e4m3fn, np.float32(0.5)).dtype == jnp.float32
    codes = fp8.quantize(jnp.float32([0.3, 100.0]), jnp.float8_e4m3fn, 2)
    np.testing.assert_array_equal(fp8.dequantize(codes, jnp.float32, 2), np.float32([0.3125, 96]))
    np.testing.assert_array_equal(fp8.out_dq(jnp.float32, 1, 2, jnp.float32([0.3])), np.float32([0.6]))


def test_float64_under_x64():
    with jax.enable_x64(True):
        x = jnp.array([0.3, 1e300, np.nan], jnp.float64)
        out = fp8.qdq(x, jnp.float8_e4m3fn, jnp.float32(1))
        chex.assert_type(out, jnp.float64)
        np.testing.assert_array_equal(out, [0.3125, 448.0, np.nan])


def test_cast_to_representable_loses_nothing_the_second_time():
    x = normal(1, 300) * 20
    once = fp8.cast_to_representable(x, jnp.float8_e5m2, 0.125)
    assert (once != x).any()
    assert_same_bits(fp8.cast_to_representable(once, jnp.float8_e5m2, 0.125), once)


def test_wrong_dtypes():
    for bad in (np.int32(1), jnp.float8_e4m3fn(1)):
        with pytest.raises(TypeError, match="16 bits or more"):
            fp8.qdq(bad, jnp.float8_e4m3fn, 1.0, jnp.float32)
    with pytest.raises(TypeError, match="q_dtype"):
        fp8.quantize(1.0, jnp.int8, 1.0)
    with pytest.raises(TypeError, match="compute_dtype must be"):
        fp8.quantize(1.0, jnp.float8_e4m3fn, 1.0, jnp.float16)
    with pytest.raises(TypeError, match="dq_dtype must be"):
        fp8.dequantize(jnp.float8_e4m3fn(1), None, jnp.float32(1))


def test_dequantize_by_a_scale_in_e8m0():
    codes = jnp.array([0.15625, 48.0], jnp.float8_e4m3fn)
    out = fp8.dequantize(codes, jnp.float32, jnp.array([2.0]).astype(jnp.float8_e8m0fnu))
    np.testing.assert_array_equal(out, [0.3125, 96.0])
