"""The GPU kernel of ``quantize_blocks`` in Pallas's Mosaic GPU backend. No GPU has run it yet.

JAX deprecates Pallas's Triton backend, in which the kernel in use is written.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.axes import vary_alike
from fp8flax._core.gemm.gemm import TILE, Ref
from fp8flax._core.gemm.mosaic import HALF, in_units, load
from fp8flax._core.gemm.quantize_blocks import numbers, over_scale, scale_of
from fp8flax._core.names import BLOCK_QUANTIZE
from fp8flax._core.qtensor import Quantizer
from fp8flax._core.quantize import divided


def block_quantize(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    inf_is_nan: bool = False,
    rounded_to: DTypeLike | None = None,
    interpret: Any = None,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns what ``quantize_blocks.block_quantize`` returns, in the same bits.

    A warpgroup quantizes a tile, which it copies to shared memory once. ``interpret`` are parameters of
    Pallas's GPU interpreter, to run on any device, for tests.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    batch, rows, columns = x.shape
    row_blocks, column_blocks = rows // TILE, columns // TILE
    is_square, dtype, wgmma = quantizer.block[0] == TILE, quantizer.dtype, plgpu.Layout.WGMMA
    halves, whole = [pl.ds(start, HALF) for start in (0, HALF)], pl.ds(0, TILE)
    divide = divided if interpret else operator.truediv  # ``divided`` is for XLA on CPUs

    def scales_of(amax: jax.Array, size: int, axis: int) -> jax.Array:
        """Returns scales along an axis: from their amaxes, or all from the amax of the tile."""
        if not is_square:
            return scale_of(quantizer, amax)
        if interpret:
            return jnp.full((size,), scale_of(quantizer, amax))
        return scale_of(quantizer, plgpu.layout_cast(jnp.full((size,), amax), wgmma.reduce(axis)))

    def kernel(
        x: Ref, *refs: Ref, tile: Ref, codes: Ref, down_codes: Ref, scales: Ref, source_ready: Ref
    ) -> None:
        """Quantizes a tile by rows and by columns, the latter transposed; ``scales[0]`` are of the rows."""
        out_codes, out_down_codes, out_scales, out_down_scales = refs
        b, i, j = (lax.axis_index(name) for name in ("batch", "row", "column"))
        down, across = pl.ds(i * TILE, TILE), pl.ds(j * TILE, TILE)
        plgpu.copy_gmem_to_smem(x.at[b, down, across], tile, source_ready)
        plgpu.barrier_wait(source_ready)

        def loaded(*index: Any) -> tuple[jax.Array, jax.Array]:
            return numbers(load(tile, index, wgmma, interpret), inf_is_nan, rounded_to)

        def over(scale: jax.Array, axis: int, values: jax.Array) -> jax.Array:
            scale = lax.broadcast_in_dim(scale, values.shape, (1 - axis,))
            return over_scale(quantizer, values, scale, divide)

        amax = jnp.maximum(*(jnp.max(loaded(half, whole)[1], axis=0) for half in halves))
        amax = jnp.max(amax, axis=0) if is_square else amax
        for half in halves:
            values, finite = loaded(half, whole)
            scale = scales_of(amax if is_square else jnp.max(finite, axis=1), HALF, 1)
            codes[half, :], scales[0, half] = over(scale, 1, values).astype(dtype), scale
        scales[1] = scales_of(amax, TILE, 0)
        plgpu.commit_smem()
        for half in halves:
            values, _ = loaded(whole, half)
            values = over(load(scales, (1, half), wgmma.reduce(0), interpret), 0, values)
            if interpret:
                down_codes[half, :] = values.astype(dtype).T
            else:
                view = plgpu.transpose_ref(down_codes.at[half, whole], (1, 0))
                view[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(codes, out_codes.at[b, down, across])
        plgpu.copy_smem_to_gmem(down_codes, out_down_codes.at[b, across, down])
        if is_square:
            out_scales[b, j, i] = out_down_scales[b, i, j] = scales[1, 0]
        else:
            plgpu.copy_smem_to_gmem(scales.at[0], out_scales.at[b, j, down])
            plgpu.copy_smem_to_gmem(scales.at[1], out_down_scales.at[b, i, across])
        plgpu.wait_smem_to_gmem(0)

    def shared(dtype: DTypeLike) -> Any:
        """Returns shared memory for a tile."""
        return plgpu.SMEM((TILE, TILE), dtype, transforms=in_units(jnp.dtype(dtype).itemsize))

    num_rows, num_columns = (row_blocks, column_blocks) if is_square else (rows, columns)
    shapes = (rows, columns), (columns, rows), (column_blocks, num_rows), (row_blocks, num_columns)
    run = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((batch, *shape), out_dtype)
            for shape, out_dtype in zip(shapes, (dtype, dtype, np.float32, np.float32))
        ],
        grid=(batch, row_blocks, column_blocks),
        grid_names=("batch", "row", "column"),
        kernel_name=BLOCK_QUANTIZE,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types={
            "tile": shared(x.dtype),
            "codes": shared(dtype),
            "down_codes": shared(dtype),
            "scales": plgpu.SMEM((2, TILE), jnp.float32),
            "source_ready": plgpu.Barrier(),
        },
        interpret=interpret,
    )
    with jax.enable_x64(False):
        results = run(x)
    codes, down_codes, scale, down_scale = (vary_alike(array, x)[0] for array in results)
    return (codes, jnp.swapaxes(scale, 1, 2)), (jnp.swapaxes(down_codes, 1, 2), down_scale)
