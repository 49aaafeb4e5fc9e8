"""Our GPU kernel that quantizes a tensor in blocks for both GEMMs that it enters, and its reference."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fp8flax._core.formats import fp8_max
from fp8flax._core.gemm.gemm import SCALE_COLUMNS, TILE, Ref
from fp8flax._core.gemm.gpus import NATIVE_FP8, NATIVE_MX, fits_kernels
from fp8flax._core.names import BLOCK_QUANTIZE
from fp8flax._core.qtensor import Dims, QTensor, Quantizer, padded, round_up
from fp8flax._core.quantize import divided, inf_to_nan, over_power_of_two
from fp8flax._core.scaling import amax_to_scale

Pair: TypeAlias = tuple[QTensor, QTensor]


class Cast(NamedTuple):
    """How a tensor ``(*batch, *rows, *columns)`` is quantized for its two GEMMs (hashable).

    One GEMM contracts the columns, the other the rows. With blocks ``(1, 128)``, a tensor ``(256, 512)``
    has scales ``(256, 4)`` for the one, and ``(2, 512)`` for the other.
    """

    quantizer: Quantizer
    dims: tuple[Dims, ...]
    """What the first GEMM of the tensor contracts, and what the second."""
    inf_is_nan: bool = False
    """Whether an Inf becomes a NaN. Otherwise it saturates."""
    rounded_to: Any = None
    """The dtype that the tensor is rounded to before; None for its own."""

    @property
    def starts_with_rows(self) -> bool:
        """Whether the first GEMM contracts the rows, and the second the columns."""
        first, second = self.dims
        return first.contract < second.contract

    def matrices(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns the shape of the tensor as a stack of matrices: batch, rows and columns."""
        first, second = self.dims
        return (second if self.starts_with_rows else first).matrices(shape)


def supports(quantizer: Quantizer, sizes: tuple[int, int, int], dtype: np.dtype, capability: float) -> bool:
    """Returns whether a GPU quantizes a stack of matrices by the kernel."""
    batch, rows, columns = sizes
    return (
        NATIVE_FP8 <= capability < NATIVE_MX  # Blackwell does not need the kernel
        and quantizer.block in ((1, SCALE_COLUMNS), (SCALE_COLUMNS, SCALE_COLUMNS))
        and quantizer.scale_columns is not None  # scales in float32
        and fits_kernels((batch, round_up(rows, TILE), round_up(columns, TILE)))
        and dtype.itemsize <= 4  # the kernel computes in float32
    )


def reference(cast: Cast, x: jax.Array) -> Pair:
    """Quantizes in plain JAX."""
    x = x if cast.rounded_to is None else x.astype(cast.rounded_to)
    x = inf_to_nan(x) if cast.inf_is_nan else x
    first = cast.quantizer.quantize(x, cast.dims[0])
    return first, first if cast.quantizer.serves_both else cast.quantizer.quantize(x, cast.dims[1])


def compute(cast: Cast, x: jax.Array, *, shares_codes: bool = False, kernel: Any = None) -> Pair:
    """Quantizes by the GPU kernel, or by another one with the arguments and results of ``block_quantize``.

    The codes for the GEMM that contracts the rows lie transposed in memory. With ``shares_codes`` both
    results have the codes that do not: with square blocks the codes are the same.
    """
    quantizer, (batch, rows, columns) = cast.quantizer, cast.matrices(x.shape)
    along_columns, along_rows = (kernel or block_quantize)(
        padded(x.reshape(batch, rows, columns), (batch, round_up(rows, TILE), round_up(columns, TILE))),
        quantizer,
        inf_is_nan=cast.inf_is_nan,
        rounded_to=cast.rounded_to,
    )
    if shares_codes:
        along_rows = along_columns

    def tensor(dims: Dims, codes: jax.Array, scale: jax.Array) -> QTensor:
        """Returns the tensor for a GEMM, without the padding of the matrices."""
        block = dims.block(quantizer.block)
        blocks = tuple(-(-size // width) for size, width in zip(x.shape, block))
        _, num_rows, num_columns = cast.matrices(blocks)
        codes, scale = codes[:, :rows, :columns], scale[:, :num_rows, :num_columns]
        return QTensor(codes.reshape(x.shape), scale.reshape(blocks), quantizer, block)

    made = (along_rows, along_columns) if cast.starts_with_rows else (along_columns, along_rows)
    return tensor(cast.dims[0], *made[0]), tensor(cast.dims[1], *made[1])


# The GPU kernel.


def block_quantize(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    inf_is_nan: bool = False,
    rounded_to: DTypeLike | None = None,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns the codes and scales of a stack of matrices, quantized along columns and along rows.

    XLA would read the matrices four times: for the amaxes of rows, for those of columns, and for two casts.
    This GPU kernel, which uses Pallas's Triton backend, reads each tile once.

    ``x`` is ``(batch, M, N)``, in a wide float dtype of at most 32 bits; M and N are multiples of 128.
    Codes and float32 scales are equal to those that ``quantizer`` makes in plain JAX. The scales are
    ``(batch, M, N / 128)`` and ``(batch, M / 128, N)``, both ``(batch, M / 128, N / 128)`` for square
    blocks. The second codes lie in the order of the transpose. ``x`` is first rounded to ``rounded_to``.
    ``interpret`` runs the kernel on any device.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    batch, rows, columns = x.shape
    row_blocks, column_blocks = rows // TILE, columns // TILE
    is_square = quantizer.block[0] == TILE

    def kernel(x_ref: Ref, codes: Ref, transposed: Ref, scales: Ref, other_scales: Ref) -> None:
        values, finite = numbers(x_ref[...], inf_is_nan, rounded_to)
        scale = scale_of(quantizer, jnp.max(finite, axis=None if is_square else 1, keepdims=True))
        codes[...], scales[...] = over_scale(quantizer, values, scale).astype(quantizer.dtype), scale.T
        scale = scale_of(quantizer, jnp.max(finite, axis=None if is_square else 0, keepdims=True))
        made = over_scale(quantizer, values, scale).astype(quantizer.dtype)
        transposed[...], other_scales[...] = made.T, scale

    def out(height: int, width: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        axes = jax.typeof(x).manual_axis_type
        return jax.ShapeDtypeStruct((batch, height, width), dtype, manual_axis_type=axes)

    def tile(height: int, width: int, *, is_transposed: bool = False) -> Any:
        index = (lambda b, i, j: (b, j, i)) if is_transposed else (lambda b, i, j: (b, i, j))
        return pl.BlockSpec((None, height, width), index)

    # The kernel writes scales with the block dimension first, the layout that the Hopper kernel reads.
    one = (1, 1) if is_square else (1, TILE)
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
        in_specs=[tile(TILE, TILE)],
        out_specs=[
            tile(TILE, TILE),
            tile(TILE, TILE, is_transposed=True),
            tile(*one, is_transposed=True),
            tile(*one),
        ],
        name=BLOCK_QUANTIZE,
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=8, num_stages=1),
    )(x)
    return (codes, jnp.swapaxes(scale, 1, 2)), (jnp.swapaxes(transposed, 1, 2), other_scale)


# What the kernels compute.


def numbers(x: jax.Array, inf_is_nan: bool, rounded_to: DTypeLike | None) -> tuple[jax.Array, jax.Array]:
    """Returns a tile in float32, after it was rounded, and its magnitudes, with 0 for Inf and NaN."""
    values = x.astype(x.dtype if rounded_to is None else rounded_to).astype(jnp.float32)
    is_finite = jnp.abs(values) <= np.finfo(np.float32).max
    finite = jnp.where(is_finite, jnp.abs(values), np.float32(0))
    return jnp.where(is_finite, values, np.float32(np.nan)) if inf_is_nan else values, finite


def scale_of(quantizer: Quantizer, amax: jax.Array) -> jax.Array:
    """Returns the scale of a block from its amax."""
    return amax_to_scale(amax, fp8_max(quantizer.dtype), quantizer.rounding)


def over_scale(
    quantizer: Quantizer, values: jax.Array, scale: jax.Array, divide: Any = divided
) -> jax.Array:
    """Returns float32 values over their scales, saturated: the codes before the cast."""
    bound = fp8_max(quantizer.dtype)
    values = (over_power_of_two if quantizer.rounding else divide)(values, scale)
    # Pallas's minimum and maximum return the number if the other operand is a NaN.
    return jnp.where(values > bound, bound, jnp.where(values < -bound, -bound, values))
