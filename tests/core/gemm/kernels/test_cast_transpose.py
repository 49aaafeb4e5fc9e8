"""Results of an elementwise function, cast in both orders, by the interpreted kernel and its reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.gemm.kernels.cast_transpose import cast_by_kernel
from fp8flax._core.gemm.request import CastTranspose
from tests import reference
from tests.cases import normal


def one(x):
    return [x]


def biased(x, bias):
    """Two results; exact in float32 for what the tests give it."""
    return [x + bias, x * np.float32(0.5)]


def bits(x):
    """Returns the codes, all NaN as one: JAX 0.9 makes another of them."""
    x = np.asarray(x)
    return np.where(np.isnan(x.astype(np.float32)), np.uint8(0xFF), x.view(np.uint8))


SHAPES = [(64, 64), (128, 256), (64, 192)]
WAYS = {
    "kernel": partial(cast_by_kernel, interpret=True),
    "reference": CastTranspose.reference,
}


@pytest.mark.oldest
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("wide", "dtype"), [("bfloat16", "float8_e4m3fn"), ("float32", "float8_e5m2")])
def test_codes_are_numpys(way, shape, wide, dtype):
    """With what saturates, NaN, an Inf, zeros of both signs and what underflows."""
    x = np.array(300 * normal(0, *shape)).astype(wide)
    x[3, 4:8] = np.nan, np.inf, -0.0, 1e-30
    scale = np.float32(0.37)
    (cast,) = jax.jit(partial(WAYS[way], CastTranspose(one, (jnp.dtype(dtype),))))([scale], x)
    expected = reference.quantize(x, dtype, scale)
    np.testing.assert_array_equal(bits(cast.codes), bits(expected))
    np.testing.assert_array_equal(bits(cast.transposed), bits(expected).T)
    assert cast.amaxes.max() == np.inf
    assert cast.sums is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_two_results_with_a_bias_and_sums(way, shape):
    x = np.round(8 * np.array(normal(1, *shape))).astype(np.float32)
    bias = np.arange(shape[1], dtype=np.float32)[None]
    dtypes = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
    scales = [np.float32(0.3), np.float32(2.0)]
    casts = jax.jit(partial(WAYS[way], CastTranspose(biased, dtypes, has_sums=True)))(scales, x, bias)
    for cast, wide, dtype, scale in zip(casts, (x + bias, x / 2), dtypes, scales, strict=True):
        np.testing.assert_array_equal(bits(cast.codes), bits(reference.quantize(wide, dtype.name, scale)))
        np.testing.assert_array_equal(bits(cast.transposed), bits(cast.codes).T)
        np.testing.assert_array_equal(cast.amaxes.max(), np.abs(wide).max())
        np.testing.assert_array_equal(cast.sums, wide.sum(0))


@pytest.mark.parametrize("shape", [(0, 64), (1, 3), (65, 130)])
def test_any_shape(shape):
    x = np.array(normal(2, *shape))
    (cast,) = CastTranspose(one, (jnp.dtype(jnp.float8_e4m3fn),)).reference([np.float32(1)], x)
    np.testing.assert_array_equal(bits(cast.codes), bits(reference.quantize(x, "float8_e4m3fn", 1)))
    assert cast.amaxes.max() == (np.abs(x).max() if x.size else -np.inf)
