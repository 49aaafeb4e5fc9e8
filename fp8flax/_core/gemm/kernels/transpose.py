"""Transposes FP8 codes: a GPU kernel that is faster than XLA's.

On Hopper the contracted dimension of an FP8 operand must be contiguous in memory. The gradient of a kernel
contracts the rows of both operands, so both must be transposed. The kernel of XLA loads four bytes at a
time and stores one. This kernel loads and stores sixteen. It uses Pallas's Triton backend, see
``cast_transpose``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._compat.varying import shape_varying_as
from fp8flax._core.gemm.gpus import has_triton
from fp8flax._core.names import TRANSPOSE

_TILE = 128
"""Rows and columns of the tile that a thread block transposes. 128 codes are a whole cache line, for reads
and for writes."""


def can_transpose(rows: Any, columns: Any) -> bool:
    """Returns whether ``transpose`` supports a matrix of this size, and Pallas has its Triton backend."""
    return (
        has_triton()
        and all(isinstance(size, int) and size > 0 and size % _TILE == 0 for size in (rows, columns))
        and rows * columns < 2**31  # Triton counts elements in 32 bits
    )


def transpose(codes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns the transpose of a matrix of codes.

    Args:
        codes: ``(M, N)``, of one byte each; M and N are multiples of 128.
        interpret: whether to run the kernel step by step on any device, for tests.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, columns = codes.shape

    def kernel(codes_ref: Any, out_ref: Any) -> None:
        out_ref[...] = codes_ref[...].T

    params = {} if interpret else {"compiler_params": triton.CompilerParams(num_warps=8, num_stages=1)}
    bits = lax.bitcast_convert_type(codes, jnp.uint8)
    out = pl.pallas_call(
        kernel,
        out_shape=shape_varying_as(bits, (columns, rows), jnp.uint8),
        grid=(rows // _TILE, columns // _TILE),
        in_specs=[pl.BlockSpec((_TILE, _TILE), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((_TILE, _TILE), lambda i, j: (j, i)),
        name=TRANSPOSE,
        interpret=interpret,
        **params,
    )(bits)
    return lax.bitcast_convert_type(out, codes.dtype)
