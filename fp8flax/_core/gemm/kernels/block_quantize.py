"""Quantizes a matrix and its transpose with scales per 128 columns: one GPU kernel.

For the two GEMMs of a tensor XLA reads it four times: for the amaxes of rows, for those of columns, and for
two casts. This kernel, which uses Pallas's Triton backend, reads each tile once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.formats import fp8_max
from fp8flax._core.names import BLOCK_QUANTIZE
from fp8flax._core.qtensor import BLOCK
from fp8flax._core.quantize import divided
from fp8flax._core.quantizers import BlockQuantizer

_LARGEST = np.finfo(np.float32).max


def block_quantize(
    x: jax.Array,
    quantizer: BlockQuantizer,
    *,
    inf_is_nan: bool = False,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns the codes and scales of a stack of matrices, quantized along columns and along rows.

    Args:
        x: the matrices, ``(batch, M, N)``, in a wide float dtype of at most 32 bits; M and N are multiples
            of 128.
        quantizer: of blocks of ``(1, 128)`` or ``(128, 128)``, with float32 scales.
        inf_is_nan: whether an Inf becomes a NaN. Otherwise it saturates. Scales ignore Inf and NaN.
        interpret: whether to run the kernel step by step on any device, for tests.

    Returns:
        Two pairs of codes and float32 scales, equal to those that ``quantizer`` makes in plain JAX. The
        scales are ``(batch, M, N / 128)`` and ``(batch, M / 128, N)``, both ``(batch, M / 128, N / 128)``
        for square blocks. The second codes lie in the order of the transpose.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    batch, rows, columns = x.shape
    row_blocks, column_blocks = rows // BLOCK, columns // BLOCK
    is_square, cast = quantizer.block[0] == BLOCK, partial(_cast, quantizer)

    def kernel(x_ref: Any, codes: Any, transposed: Any, scales: Any, of_columns: Any) -> None:
        values = x_ref[...].astype(jnp.float32)
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
            codes[...], scales[...] = along_rows, scale.T
            along_columns, scale = cast(values, jnp.max(finite, axis=0, keepdims=True))
            transposed[...], of_columns[...] = along_columns.T, scale

    def out(height: int, width: int, dtype: Any) -> Any:
        axes = jax.typeof(x).manual_axis_type
        return jax.ShapeDtypeStruct((batch, height, width), dtype, manual_axis_type=axes)

    def tile(height: int, width: int, *, is_transposed: bool = False) -> Any:
        index = (lambda b, i, j: (b, j, i)) if is_transposed else (lambda b, i, j: (b, i, j))
        return pl.BlockSpec((None, height, width), index)

    # The kernel writes scales with the block dimension first, the layout that the Hopper kernel reads.
    one = (1, 1) if is_square else (1, BLOCK)
    scale_rows, scale_columns = (row_blocks, column_blocks) if is_square else (rows, columns)
    codes, transposed, scale, other_scale = pl.pallas_call(
        kernel,
        out_shape=[
            out(rows, columns, quantizer.dtype),
            out(columns, rows, quantizer.dtype),
            out(column_blocks, scale_rows, jnp.float32),
            out(row_blocks, scale_columns, jnp.float32),
        ],
        grid=(batch, row_blocks, column_blocks),
        in_specs=[tile(BLOCK, BLOCK)],
        out_specs=[
            tile(BLOCK, BLOCK),
            tile(BLOCK, BLOCK, is_transposed=True),
            tile(*one, is_transposed=True),
            tile(*one),
        ],
        name=BLOCK_QUANTIZE,
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=8, num_stages=1),
    )(x)
    return (codes, jnp.swapaxes(scale, 1, 2)), (jnp.swapaxes(transposed, 1, 2), other_scale)


def _cast(quantizer: BlockQuantizer, values: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of float32 values, and their scale, which is computed from ``amax``."""
    scaled, scale = quantizer.scaled(values, amax, divided)
    # Pallas's minimum and maximum return the number if the other operand is a NaN.
    bound = np.float32(fp8_max(quantizer.dtype))
    saturated = jnp.where(scaled > bound, bound, jnp.where(scaled < -bound, -bound, scaled))
    return saturated.astype(quantizer.dtype), scale
