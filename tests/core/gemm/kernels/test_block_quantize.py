"""The kernels for scales per block, interpreted step by step, beside what they stand for."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.gemm.kernels.block_quantize import block_quantize
from fp8flax._core.qtensor import Dims

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def ugly(dtype, rows=256, columns=384):
    """Two matrices with rows of all magnitudes, blocks of zeros, NaN, Inf and what is no normal number."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 256, 384)) * np.exp(3 * rng.standard_normal((2, 256, 1)))
    x[0, :130, :130] = 0
    x[0, 200] *= 1e30
    x[0, 201] *= 1e-36
    x[0, 202] *= 1e-39
    x[1, 3, 5], x[1, 4, 5], x[1, 7, 8] = np.inf, -np.inf, np.nan
    return jnp.asarray(x, dtype)[:, :rows, :columns]


KINDS = [
    (E4M3, "power_of_two", jnp.float32),
    (E4M3, "float32", jnp.bfloat16),
    (E5M2, "float32", jnp.float32),
]
SIZES = [((256, 384), False), ((256, 384), True), ((203, 384), False), ((210, 140), True)]
# Each kind with each block, and each size with each block.
CASES = [
    (block, *KINDS[(i + j) % 3], *size)
    for i, block in enumerate([(1, 128), (128, 128)])
    for j, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("block", "dtype", "scale", "of", "sizes", "inf_is_nan"), CASES, ids=str)
def test_both_orders_are_those_of_the_quantizer(block, dtype, scale, of, sizes, inf_is_nan):
    """To the last bit of codes and scales; of sizes that are no multiples of a block, too."""
    quantizer = fp8.BlockQuantizer(dtype=dtype, block=block, scale=scale)
    x = ugly(of, *sizes)
    kernel = partial(
        block_quantize,
        dtype=dtype,
        is_square=block[0] > 1,
        power_2=scale == "power_of_two",
        inf_is_nan=inf_is_nan,
        interpret=True,
    )
    seen = jnp.where(jnp.isinf(x), jnp.nan, x) if inf_is_nan else x
    for (codes, scales), contract in zip(jax.jit(kernel)(x), (2, 1)):
        if contract == 1:  # of the transpose
            codes, scales = jnp.swapaxes(codes, 1, 2), jnp.swapaxes(scales, 1, 2)
        codes = codes[:, : x.shape[1], : x.shape[2]]
        dims = Dims(3, (contract,), 1)
        wanted = jax.jit(lambda x, dims=dims: quantizer.quantize(x, dims))(seen)
        np.testing.assert_array_equal(scales, wanted.scale)
        is_nan = np.isnan(np.asarray(codes, np.float32))
        np.testing.assert_array_equal(is_nan, np.isnan(np.asarray(wanted.codes, np.float32)))
        assert is_nan.sum() == (3 if inf_is_nan else 1)
        np.testing.assert_array_equal(
            np.asarray(codes).view(np.uint8)[~is_nan], np.asarray(wanted.codes).view(np.uint8)[~is_nan]
        )


def test_nothing_that_may_be_nan_meets_a_minimum_or_maximum():
    """Those of Pallas's Triton backend prefer a number to a NaN, which no interpreter shows."""
    x = jnp.zeros((1, 128, 128))
    for kernel in (
        partial(block_quantize, dtype=E4M3, is_square=False, power_2=True),
        partial(block_quantize, dtype=E4M3, is_square=True, power_2=False),
    ):
        text = str(jax.make_jaxpr(kernel)(x))
        assert "pallas_call" in text
        assert not re.search(r":f32\[128,128\] = (max|min|clamp)\b", text)
