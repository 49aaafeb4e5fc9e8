"""A GEMM of stacks of matrices with scales per block, for Hopper's FP8 units."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.gemm.kernels.tiled_gemm_hopper import Block, tiled_gemm
from fp8flax._core.gemm.sizes import padded, round_up
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
        rhs: FP8 codes, ``(batch, N, K)``. ``multiplies_on_hopper`` must be True for both dtypes.
        lhs_scale: float32, ``(batch, M, K / 128)``.
        rhs_scale: float32, ``(batch, N, K / 128)``, or ``(batch, ceil(N / 128), K / 128)`` if 128 rows
            share a scale.
        out_dtype: ``bfloat16``, ``float16`` or ``float32``.
        interpret: see ``tiled_gemm``.
    """
    batch, rows, depth = lhs.shape
    columns, num_blocks = rhs.shape[1], depth // BLOCK
    filled_rows, filled_columns = round_up(rows), round_up(columns)
    # The rows of the right operand have scales of their own, or blocks of 128 rows have one.
    num_scales = filled_columns // (1 if rhs_scale.shape[1] == columns else BLOCK)

    def stacked(codes: jax.Array, size: int) -> jax.Array:
        """Returns the matrices of codes one below the other, each padded to ``size`` rows."""
        return padded(codes, (batch, size, depth)).reshape(-1, depth)

    def blocks_first(scale: jax.Array, size: int) -> jax.Array:
        """Returns scales as ``(blocks, rows)``: the kernel fetches the scales of the rows of a block."""
        return jnp.moveaxis(padded(scale, (batch, size, num_blocks)), 2, 0).reshape(num_blocks, -1)

    def block(t: Any, b: Any) -> Block:
        matrix = lax.div(t, np.int32(filled_rows // TILE))
        return Block(lhs=t, rhs=matrix * np.int32(filled_columns // TILE), depth=b, scale=t)

    out = tiled_gemm(
        stacked(lhs, filled_rows),
        stacked(rhs, filled_columns),
        blocks_first(lhs_scale, filled_rows),
        blocks_first(rhs_scale, num_scales),
        num_blocks=num_blocks,
        block=block,
        shape=(batch * filled_rows, filled_columns),
        out_dtype=out_dtype,
        name=BLOCK_GEMM_HOPPER,
        interpret=interpret,
    )
    return out.reshape(batch, filled_rows, filled_columns)[:, :rows, :columns]
