"""Quantizes a matrix and its transpose with scales per 128 columns: one GPU kernel.

A tensor enters two GEMMs and is quantized for both, with blocks along either dimension. XLA reads the
tensor four times: for the amaxes of rows, for those of columns, and for two casts. This kernel reads each
tile once.

The kernel uses Pallas's Triton backend, which JAX calls deprecated from 0.11 on. Without that backend the
reference runs, with the same values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.axes import shape_varying_as
from fp8flax._core.formats import fp8_max
from fp8flax._core.names import BLOCK_QUANTIZE
from fp8flax._core.qtensor import BLOCK
from fp8flax._core.quantize import clipped, divided
from fp8flax._core.scaling import compute_scale, power_of_two, scale_exponent

_LARGEST = np.finfo(np.float32).max


def block_quantize(
    x: jax.Array,
    dtype: Any,
    *,
    is_square: bool,
    power_2: bool,
    inf_is_nan: bool = False,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns the codes and scales of a stack of matrices, and the codes and scales of its transpose.

    Args:
        x: the matrices, ``(batch, M, N)``, in a wide float dtype of at most 32 bits.
        dtype: FP8 dtype of all codes.
        is_square: whether 128 rows and 128 columns share a scale. Otherwise 128 columns of one row do.
        power_2: whether scales are rounded up to powers of two.
        inf_is_nan: whether an Inf becomes a NaN. Otherwise it saturates. Scales ignore Inf and NaN.
        interpret: whether to run the kernel step by step on any device, for tests.

    Returns:
        Two pairs of codes and float32 scales. The codes of the first pair have shape ``(batch, M, N)``, and
        columns are padded with zeros to a multiple of 128, with ``is_square`` rows, too. The scales have
        the shape ``(batch, M, ceil(N / 128))``, or ``(batch, ceil(M / 128), ceil(N / 128))`` with
        ``is_square``. The second pair is the same for the transpose, ``(batch, N, M)``. Codes and scales
        equal those of ``BlockQuantizer``, whose codes have no padding.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    batch, rows, columns = x.shape
    grid = batch, -(-rows // BLOCK), -(-columns // BLOCK)
    filled = grid[1] * BLOCK, grid[2] * BLOCK
    is_whole = filled == (rows, columns)
    limit = fp8_max(dtype)

    def cast(values: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the codes of float32 values, and their scale, which is computed from ``amax``."""
        if power_2:
            exponent = jnp.maximum(scale_exponent(amax, limit, "up"), np.int32(-126))
            scale, scaled = power_of_two(exponent), values * power_of_two(-exponent)
        else:
            scale = compute_scale(amax, 1.0, limit)
            scaled = divided(values, scale)
        return clipped(scaled, limit).astype(dtype), scale

    def inside(axis: int, shape: tuple[int, ...], size: int) -> jax.Array:
        """Returns a mask of this shape: which rows or columns of the tile lie within the matrix.

        Args:
            axis: the axis of the grid: 1 for rows, 2 for columns.
            shape: shape of the mask; its last axis runs over the rows or columns of the tile.
            size: number of rows or columns of the matrix.
        """
        return pl.program_id(axis) * BLOCK + lax.broadcasted_iota(np.int32, shape, len(shape) - 1) < size

    def store(ref: Any, value: jax.Array, mask: jax.Array | None) -> None:
        """Writes a tile; if the tile may reach beyond the matrix, only where ``mask`` is True."""
        if is_whole:
            ref[...] = value
        else:
            triton.store(ref, value, mask=mask)

    def kernel(x_ref: Any, codes: Any, transposed: Any, scales: Any, of_columns: Any) -> None:
        shape_of_tile = BLOCK, BLOCK
        in_columns = inside(2, shape_of_tile, columns)
        in_rows = inside(1, shape_of_tile, rows).T
        if is_whole:
            values = x_ref[...].astype(jnp.float32)
        else:
            mask = in_rows & in_columns
            values = triton.load(x_ref, mask=mask, other=0).astype(jnp.float32)
        is_finite = jnp.abs(values) <= _LARGEST
        finite = jnp.where(is_finite, jnp.abs(values), np.float32(0))
        if inf_is_nan:
            values = jnp.where(is_finite, values, np.float32(np.nan))
        if is_square:
            along_rows, scale = cast(values, jnp.max(finite, keepdims=True))
            codes[...], transposed[...] = along_rows, along_rows.T
            scales[...] = of_columns[...] = scale
        else:
            along_rows, scale = cast(values, jnp.max(finite, axis=1, keepdims=True))
            store(codes, along_rows, in_rows)
            store(scales, scale.T, inside(1, (1, BLOCK), rows))
            along_columns, scale = cast(values, jnp.max(finite, axis=0, keepdims=True))
            store(transposed, along_columns.T, in_columns.T)
            store(of_columns, scale, inside(2, (1, BLOCK), columns))

    def tile(height: int, width: int, index: Any) -> Any:
        return pl.BlockSpec((None, height, width), index)

    def shape(*sizes: int, dtype: Any = dtype) -> Any:
        return shape_varying_as(x, (batch, *sizes), dtype)

    outs = [
        (
            shape(filled[0] if is_square else rows, filled[1]),
            tile(BLOCK, BLOCK, lambda b, i, j: (b, i, j)),
        ),
        (
            shape(filled[1] if is_square else columns, filled[0]),
            tile(BLOCK, BLOCK, lambda b, i, j: (b, j, i)),
        ),
    ]
    # The kernel writes scales with the block dimension first, the layout that the Hopper kernel reads.
    if is_square:
        scales = [
            (shape(grid[2], grid[1], dtype=jnp.float32), tile(1, 1, lambda b, i, j: (b, j, i))),
            (shape(grid[1], grid[2], dtype=jnp.float32), tile(1, 1, lambda b, i, j: (b, i, j))),
        ]
    else:
        scales = [
            (shape(grid[2], rows, dtype=jnp.float32), tile(1, BLOCK, lambda b, i, j: (b, j, i))),
            (shape(grid[1], columns, dtype=jnp.float32), tile(1, BLOCK, lambda b, i, j: (b, i, j))),
        ]
    params = {} if interpret else {"compiler_params": triton.CompilerParams(num_warps=8, num_stages=1)}
    codes, transposed, scale, other_scale = pl.pallas_call(
        kernel,
        out_shape=[out for out, _ in (*outs, *scales)],
        grid=grid,
        in_specs=[tile(BLOCK, BLOCK, lambda b, i, j: (b, i, j))],
        out_specs=[spec for _, spec in (*outs, *scales)],
        name=BLOCK_QUANTIZE,
        interpret=interpret,
        **params,
    )(x)
    swapped = (0, 2, 1)
    return (codes, lax.transpose(scale, swapped)), (transposed, lax.transpose(other_scale, swapped))
