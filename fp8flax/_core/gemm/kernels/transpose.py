"""Transposes FP8 codes: one kernel, and XLA's own.

Hopper's GEMMs read FP8 along what they sum over, which for the gradient of a kernel are the rows of both
operands. XLA transposes codes for that by a kernel that loads four bytes at a time and stores one; this one
loads and stores sixteen. It is one of Pallas's Triton backend, as ``cast_transpose`` says.
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
"""Rows and columns of a block of threads: a whole line of the caches, either way."""


def can_transpose(rows: Any, columns: Any) -> bool:
    """Tells whether there is a kernel for matrices of this size."""
    return (
        has_triton()
        and all(isinstance(size, int) and size > 0 and size % _TILE == 0 for size in (rows, columns))
        and rows * columns < 2**31  # Triton counts elements in 32 bits
    )


def transpose(codes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns codes of shape ``(M, N)``, of one byte each, as ``(N, M)``.

    Args:
        codes: both sizes are multiples of 128.
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
