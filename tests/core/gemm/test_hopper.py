"""The GPU kernel for Hopper's FP8 units, interpreted step by step, beside float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.gemm import hopper
from fp8flax._core.gemm.hopper import tiled_gemm
from tests.cases import error_of_product, hopper_gemm

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.fixture
def _interpreted(monkeypatch):
    """The interpreter compiles the kernel anew for each core that there is. One does all tiles, in turn."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    monkeypatch.setattr(hopper, "num_cores", lambda: 1)
    monkeypatch.setattr(hopper, "tiled_gemm", partial(tiled_gemm, interpret=InterpretGPUParams()))


@pytest.mark.long
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(
    ("shape", "out_dtype"),
    [((1, 200, 256, 136), jnp.float32), ((2, 3, 384, 128), jnp.bfloat16), ((1, 130, 128, 1), jnp.float16)],
    ids=str,
)
def test_stacks_of_matrices(shape, out_dtype):
    """Sizes that its tiles do not divide, several matrices, one block."""
    batch, rows, depth, columns = shape
    rng = np.random.default_rng(0)
    blocks = -(-columns // 128)
    filled = 128 * blocks
    dtype = E5M2 if out_dtype == jnp.bfloat16 else E4M3
    codes = [jnp.asarray(rng.normal(size=(batch, n, depth)), dtype) for n in (rows, filled)]
    scales = [
        jnp.asarray(2.0 ** rng.uniform(-3, 3, (batch, n, depth // 128)), jnp.float32)
        for n in (rows, blocks)
    ]
    out = jax.jit(partial(hopper_gemm, out_dtype=out_dtype))(*codes, *scales)
    assert (out.shape, out.dtype) == ((batch, rows, filled), out_dtype)
    wide = [
        np.repeat(np.repeat(s, c.shape[1] // s.shape[1], 1), 128, 2) * np.asarray(c, np.float64)
        for c, s in zip(codes, scales)
    ]
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[jnp.dtype(out_dtype).name]
    assert error_of_product(out, wide[0] @ wide[1].transpose(0, 2, 1), *wide) <= tolerance


@pytest.mark.long
@pytest.mark.usefixtures("_interpreted")
def test_scales_almost_out_of_range():
    """One scale is almost out of the range of float32; a block of zeros has the scale 1."""
    rng = np.random.default_rng(0)
    magnitudes = np.array([(1e37, 1e-12), (1e-12, 1e37), (1e-30, 1e-1), (1e30, 1e-30), (1e-35, 1e4)])
    codes = [jnp.asarray(rng.normal(size=(5, n, 256)) * 90, E4M3) for n in (2, 3)]
    scales = [
        jnp.asarray(one[:, None, None] / 448 * rng.uniform(1, 2, (5, n, 2)), jnp.float32)
        for one, n in zip(magnitudes.T, (2, 3))
    ]
    codes[0], scales[0] = codes[0].at[:, 1, 128:].set(0), scales[0].at[:, 1, 1].set(1)
    out = jax.jit(partial(hopper_gemm, out_dtype=jnp.float32))(*codes, *scales)
    wide = [
        np.repeat(np.asarray(s, np.float64), 128, 2) * np.asarray(c, np.float64)
        for c, s in zip(codes, scales)
    ]
    for ours, lhs, rhs in zip(out, *wide):
        assert error_of_product(ours, lhs @ rhs.T, lhs, rhs) <= 2e-6
