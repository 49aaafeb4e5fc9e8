"""The GPU kernel for groups of rows, interpreted step by step, with a tiling of its own, beside NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.gemm.kernels import tiled_gemm_hopper
from fp8flax._core.gemm.kernels.tiled_gemm_hopper import Tile, Tiling, tiled_gemm


def tile(table, t):
    """Two tiles of the result: each is the product of the rows that the table says."""
    row, zero = t * np.int32(128), jnp.int32(0)
    return Tile(table[0, t], zero, zero, jnp.int32(1), row, zero, table[1, t])


OPERANDS = [
    jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float8_e4m3fn)
    for shape in ((384, 128), (128, 128))
]
TILING = Tiling(256, 128, 2, False, tile)
TABLE = np.int32([[256, 0], [128, 40]])


def multiply(lhs, rhs, table, **options):
    scales = jnp.full(1, 2.0), jnp.full(1, 0.25)
    return tiled_gemm(
        lhs, rhs, *scales, table, tiling=TILING, out_dtype=jnp.float32, name="tiles", **options
    )


@pytest.mark.long
def test_a_tile_is_the_product_of_its_rows(monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    monkeypatch.setattr(tiled_gemm_hopper, "num_cores", lambda: 1)
    out = jax.jit(lambda *args: multiply(*args, interpret=InterpretGPUParams()))(*OPERANDS, TABLE)
    lhs, rhs = (np.asarray(x, np.float64) for x in OPERANDS)
    np.testing.assert_allclose(out[:128], 0.5 * lhs[256:] @ rhs.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[128:168], 0.5 * lhs[:40] @ rhs.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_no_more_thread_blocks_than_tiles(count):
    """The kernel has one thread block per tile, or one per core of the GPU if there are more tiles."""
    tiling = TILING._replace(num_tiles=count)
    scale = jnp.ones(1)
    program = jax.make_jaxpr(
        lambda *args: tiled_gemm(
            *args, scale, scale, TABLE, tiling=tiling, out_dtype=jnp.bfloat16, name="tiles"
        )
    )(*OPERANDS)
    assert program.out_avals[0].shape == (256, 128)
    assert f"grid=({count},)" in str(program).replace(" ", "") or f"'core':{count}" in str(program)
