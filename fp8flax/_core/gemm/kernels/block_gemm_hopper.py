"""A GEMM of stacks of matrices with scales per block, for Hopper's FP8 units."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.gemm.kernels.tiled_gemm_hopper import Tile, Tiling, tiled_gemm
from fp8flax._core.names import BLOCK_GEMM_HOPPER
from fp8flax._core.qtensor import BLOCK, TILE


def hopper_block_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    *,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """Returns the product of two block-scaled stacks of matrices, ``(batch, M, N)``.

    ``out[b, m, n] = sum_k (sum_c lhs[b, m, c] * rhs[b, n, c]) * lhs_scale[b, m, k] * rhs_scale[b, n, k]``
    where ``c`` runs over the 128 columns of block ``k``. The two scales of a block are multiplied first,
    see ``tiled_gemm``.

    Args:
        lhs: FP8 codes, ``(batch, M, K)``; K is a multiple of 128.
        rhs: FP8 codes, ``(batch, N, K)``. ``multiplies_dtypes`` must be True for both dtypes.
        lhs_scale: float32, ``(batch, M, K / 128)``.
        rhs_scale: float32, ``(batch, N, K / 128)``, or ``(batch, ceil(N / 128), K / 128)`` if 128 rows
            share a scale.
        out_dtype: ``bfloat16``, ``float16`` or ``float32``.
        interpret: see ``tiled_gemm``.
    """
    batch, rows, depth = lhs.shape
    columns, num_blocks = rhs.shape[1], depth // BLOCK
    is_square = rhs_scale.shape[1] != columns
    left, right, lhs_scale = map(_whole_tiles, (lhs, rhs, lhs_scale))
    if not is_square:
        rhs_scale = _whole_tiles(rhs_scale)
    # The scales get the shape (blocks, rows), so that the scales that the kernel fetches are contiguous.
    lhs_scale, rhs_scale = (jnp.moveaxis(x, 2, 0).reshape(num_blocks, -1) for x in (lhs_scale, rhs_scale))
    (_, filled_rows, _), (_, filled_columns, _) = left.shape, right.shape
    tiling = _tiling_of_matrices(batch, filled_rows, filled_columns, num_blocks)
    out = tiled_gemm(
        left.reshape(-1, depth),
        right.reshape(-1, depth),
        lhs_scale,
        rhs_scale,
        table=None,
        tiling=tiling,
        out_dtype=out_dtype,
        name=BLOCK_GEMM_HOPPER,
        interpret=interpret,
    )
    return out.reshape(batch, filled_rows, filled_columns)[:, :rows, :columns]


def _tiling_of_matrices(batch: int, rows: int, columns: int, num_blocks: int) -> Tiling:
    """Returns the tiling of a stack of products; both operands have their matrices one below the other.

    Args:
        batch: number of matrices.
        rows: number of rows of each left matrix, a multiple of ``TILE``.
        columns: number of rows of each right matrix, a multiple of ``TILE``.
        num_blocks: number of blocks of the contraction.
    """
    tiles = rows // TILE

    def tile(table: None, t: Any) -> Tile:
        row, matrix = t * np.int32(TILE), lax.div(t, np.int32(tiles))
        return Tile(
            lhs_row=row,
            rhs_row=matrix * np.int32(columns),
            block=0,
            num_blocks=num_blocks,
            out_row=row,
            low=0,
            high=TILE,
        )

    return Tiling(batch * rows, columns, batch * tiles, is_whole=True, tile=tile)


def _whole_tiles(x: jax.Array) -> jax.Array:
    """Pads the rows of a stack of matrices with zeros, to a multiple of 128."""
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, -x.shape[1] % BLOCK, 0), (0, 0, 0)))
