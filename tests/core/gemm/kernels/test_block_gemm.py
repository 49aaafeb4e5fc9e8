"""The Triton kernel for block scales, interpreted step by step, beside float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.gemm.kernels.block_gemm import block_gemm
from tests.cases import (
    MAGNITUDES,
    assert_in_range,
    block_gemm_in_jax,
    cells,
    error_of_product,
)


@pytest.mark.parametrize(
    ("shape", "in_float16"),
    cells(
        [((2, 40, 384, 150), False), ((1, 1, 256, 3), True), ((1, 128, 128, 128), False)],
        repeated=[((1, 128, 128, 128), False)],
    ),
)
def test_the_block_kernel_beside_its_twin(shape, in_float16):
    """Interpreted, step by step; sizes that its tiles do not divide."""
    batch, rows, depth, columns = shape
    rng = np.random.default_rng(0)
    dtypes = (jnp.float8_e5m2 if in_float16 else jnp.float8_e4m3fn, jnp.float8_e4m3fn)
    codes = [
        jnp.asarray(rng.normal(size=(batch, n, depth)) * 50, dtype)
        for n, dtype in zip((rows, columns), dtypes)
    ]
    scales = [
        jnp.asarray(2.0 ** rng.uniform(-9, 9, (batch, n, depth // 128)), jnp.float32)
        for n in (rows, columns)
    ]
    wide = [np.repeat(s, 128, 2) * np.asarray(c, np.float64) for c, s in zip(codes, scales)]
    exact = wide[0] @ wide[1].transpose(0, 2, 1)
    twin = jax.jit(partial(block_gemm_in_jax, out_dtype=jnp.float32))(*codes, *scales)
    assert error_of_product(twin, exact, *wide) <= 1e-6
    for out_dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)):
        ours = jax.jit(partial(block_gemm, out_dtype=out_dtype, in_float16=in_float16, interpret=True))(
            *codes, *scales
        )
        assert (ours.shape, ours.dtype) == ((batch, rows, columns), out_dtype)
        assert error_of_product(ours, exact, *wide) <= tolerance


@pytest.mark.optimized
@pytest.mark.oldest
def test_the_block_kernel_in_range():
    run = jax.jit(partial(block_gemm, out_dtype=jnp.float32, in_float16=False, interpret=True))
    rng = np.random.default_rng(0)
    codes = [jnp.asarray(rng.normal(size=(1, n, 256)) * 90, jnp.float8_e4m3fn) for n in (40, 150)]
    for magnitudes in MAGNITUDES:
        scales = [
            jnp.asarray(magnitude / 448 * rng.uniform(1, 2, (1, n, 2)), jnp.float32)
            for n, magnitude in zip((40, 150), magnitudes)
        ]
        wide = [
            np.repeat(np.asarray(s, np.float64), 128, 2) * np.asarray(c, np.float64)
            for c, s in zip(codes, scales)
        ]
        assert_in_range(run(*codes, *scales), wide[0] @ wide[1].transpose(0, 2, 1), *wide)
