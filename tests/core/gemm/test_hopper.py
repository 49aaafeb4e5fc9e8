"""The GPU kernel for Hopper's FP8 units, interpreted step by step, beside float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.gemm import hopper, hopper_ahead
from fp8flax._core.gemm.gpus import new_kernels
from fp8flax._core.gemm.hopper import tiled_gemm
from tests.cases import MATMUL, RECIPES, error_of_product, fp8_dot_general, hopper_gemm, struct

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
@pytest.mark.parametrize("height", [1, 128])
def test_the_kernel_that_copies_ahead(height, monkeypatch):
    """Without clusters and single threads, which the interpreter does not know."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    monkeypatch.setattr(hopper_ahead, "num_cores", lambda: 1)
    rng = np.random.default_rng(0)
    codes = [jnp.asarray(rng.normal(size=(256, 384)), E4M3) for _ in range(2)]
    scales = [jnp.asarray(rng.uniform(0.5, 2, (3, n)), jnp.float32) for n in (256, 256 // height)]
    config = hopper_ahead.Config(stages=2, cluster=1)
    interpret = InterpretGPUParams(detect_races=False)
    out = hopper_ahead.block_gemm(*zip(codes, scales), jnp.float32, config, interpret)
    wide = [
        np.asarray(c, np.float64) * np.repeat(np.repeat(s, 256 // s.shape[1], 1), 128, 0).T
        for c, s in zip(codes, scales)
    ]
    assert error_of_product(out, wide[0] @ wide[1].T, *wide) <= 1e-6


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_the_kernel_that_copies_ahead_compiles_and_is_chosen_by_the_switch_alone(out_dtype, monkeypatch):
    seen, compute = [], hopper_ahead.compute
    monkeypatch.setattr(hopper_ahead, "compute", lambda *args: seen.append(args) or compute(*args))
    dot = partial(
        fp8_dot_general,
        dimension_numbers=MATMUL,
        recipe=RECIPES["block128"],
        preferred_element_type=out_dtype,
    )
    for is_on in (False, True):
        with new_kernels(is_on):
            report = fp8.audit(dot, struct(512, 256), struct(256, 512))
        assert (report.num_fp8_gemms, bool(seen)) == (1, is_on)


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
