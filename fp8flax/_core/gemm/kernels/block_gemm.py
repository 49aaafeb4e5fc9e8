"""A GEMM whose scales change along the contraction: a GPU kernel in Pallas's Triton backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._compat.varying import shape_varying_as
from fp8flax._core.axes import vary_alike
from fp8flax._core.names import BLOCK_GEMM, BLOCK_GEMM_F16
from fp8flax._core.qtensor import BLOCK
from fp8flax._core.scaling import apply_scales


def block_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    *,
    out_dtype: Any,
    in_float16: bool,
    interpret: bool = False,
) -> jax.Array:
    """Returns the product of two block-scaled stacks of matrices, ``(batch, M, N)``.

    ``out[b, m, n] = sum_k (sum_c lhs[b, m, c] * rhs[b, n, c]) * lhs_scale[b, m, k] * rhs_scale[b, n, k]``
    where ``c`` runs over the 128 columns of block ``k``. Each block's sum of products is multiplied by its
    scales as it is added, in float32.

    Args:
        lhs: FP8 codes, ``(batch, M, K)``; K is a multiple of 128.
        rhs: FP8 codes, ``(batch, N, K)``.
        lhs_scale: float32, ``(batch, M, K / 128)``.
        rhs_scale: float32, ``(batch, N, K / 128)``.
        out_dtype: dtype of the result.
        in_float16: whether to multiply in float16, which holds FP8 values exactly, instead of FP8. Pallas's
            Triton backend does not use Hopper's FP8 units for this kernel. It multiplies two different FP8
            dtypes in FP8 on no GPU.
        interpret: whether to run the kernel step by step on any device, for tests.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (batch, rows, depth), columns = lhs.shape, rhs.shape[1]
    num_blocks = depth // BLOCK

    def kernel(lhs_ref: Any, rhs_ref: Any, lhs_scale_ref: Any, rhs_scale_ref: Any, out_ref: Any) -> None:
        def add_block(k: jax.Array, total: jax.Array) -> jax.Array:
            of_block = pl.ds(k * BLOCK, BLOCK)
            lhs_tile, rhs_tile = lhs_ref[:, of_block], rhs_ref[:, of_block]
            if in_float16:
                lhs_tile, rhs_tile = lhs_tile.astype(jnp.float16), rhs_tile.astype(jnp.float16)
            product = lax.dot_general(
                lhs_tile, rhs_tile, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            return total + apply_scales(product, lhs_scale_ref[:, k][:, None], rhs_scale_ref[:, k][None, :])

        zeros = jnp.zeros((BLOCK, BLOCK), jnp.float32)
        out_ref[...] = lax.fori_loop(0, num_blocks, add_block, zeros).astype(out_dtype)

    def of_rows(b: Any, i: Any, j: Any) -> Any:
        return b, i, 0

    def of_columns(b: Any, i: Any, j: Any) -> Any:
        return b, j, 0

    params = {} if interpret else {"compiler_params": triton.CompilerParams(num_warps=8, num_stages=3)}
    padded = vary_alike(*(whole_tiles(x) for x in (lhs, rhs, lhs_scale, rhs_scale)))
    shape = (batch, padded[0].shape[1], padded[1].shape[1])
    out = pl.pallas_call(
        kernel,
        out_shape=shape_varying_as(padded[0], shape, out_dtype),
        grid=(batch, shape[1] // BLOCK, shape[2] // BLOCK),
        in_specs=[
            pl.BlockSpec((None, BLOCK, depth), of_rows),
            pl.BlockSpec((None, BLOCK, depth), of_columns),
            pl.BlockSpec((None, BLOCK, num_blocks), of_rows),
            pl.BlockSpec((None, BLOCK, num_blocks), of_columns),
        ],
        out_specs=pl.BlockSpec((None, BLOCK, BLOCK), lambda b, i, j: (b, i, j)),
        name=BLOCK_GEMM_F16 if in_float16 else BLOCK_GEMM,
        interpret=interpret,
        **params,
    )(*padded)
    return out[:, :rows, :columns]


def whole_tiles(x: jax.Array) -> jax.Array:
    """Pads the rows of a stack of matrices with zeros, to a multiple of 128."""
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, -x.shape[1] % BLOCK, 0), (0, 0, 0)))
