"""Quantizes a tensor in blocks, for both GEMMs that it enters: by one GPU kernel on Hopper and Ada."""

from __future__ import annotations

import dataclasses
import math
import string
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from fp8flax._compat.choice_at_lowering import unless_partitioned
from fp8flax._core.formats import fp8_max
from fp8flax._core.gemm.gpus import NATIVE_FP8, NATIVE_MX, are_positive, compute_capability, fits_kernels
from fp8flax._core.gemm.on_shards import on_shards
from fp8flax._core.names import BLOCK_QUANTIZE
from fp8flax._core.qtensor import BLOCK, Dims, QTensor, Quantizer, padded, round_up
from fp8flax._core.quantize import divided, inf_to_nan, over_power_of_two
from fp8flax._core.scaling import amax_to_scale

Pair = tuple[QTensor, QTensor]


class Cast(NamedTuple):
    """How a tensor ``(*batch, *rows, *columns)`` is quantized for its two GEMMs (hashable)."""

    quantizer: Quantizer
    first: Dims
    """What the first GEMM of the tensor contracts: its rows or its columns."""
    inf_is_nan: bool = False
    """Whether an Inf becomes a NaN. Otherwise it saturates."""

    @property
    def second(self) -> Dims:
        """Returns what the second GEMM contracts: the other ones."""
        return self.first._replace(contract=self.first.free)

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns the shape of the tensor as a stack of matrices."""
        batch = self.first.num_batch
        behind = batch + len(min(self.first.contract, self.second.contract))
        return math.prod(shape[:batch]), math.prod(shape[batch:behind]), math.prod(shape[behind:])


def quantize_blocks(cast: Cast, x: jax.Array) -> Pair:
    """Returns a tensor quantized for its first GEMM, and for its second GEMM.

    Under ``jax.vmap`` the batch becomes a batch dimension.
    """
    quantize = custom_vmap(partial(_quantize, cast))

    @quantize.def_vmap
    def _(size: int, is_batched: Any, x: jax.Array) -> Any:
        made = quantize_blocks(cast._replace(first=cast.first.batched()), x)
        # The blocks are those of one tensor of the batch.
        pair = tuple(dataclasses.replace(q, block=q.block[1:]) for q in made)
        return pair, jax.tree.map(lambda _: True, pair)

    return quantize(x)


def _quantize(cast: Cast, x: jax.Array) -> Pair:
    """Quantizes in the way of the device that the program is for."""
    quantizer, capability, sizes = cast.quantizer, compute_capability(), cast.matrix(x.shape)
    reference, by_kernel = partial(_by_xla, cast), partial(_by_kernel, cast)
    if not (capability and are_positive(sizes) and quantizer.block[0] in (1, quantizer.block[1])):
        return reference(x)
    has_kernel = (
        NATIVE_FP8 <= capability < NATIVE_MX  # Blackwell does not need the kernel
        and quantizer.block in ((1, BLOCK), (BLOCK, BLOCK))
        and quantizer.scale_columns is not None  # scales in float32
        and fits_kernels((sizes[0], *map(round_up, sizes[1:])))
        and x.dtype.itemsize <= 4  # the kernel computes in float32
    )

    def of_parts(x: jax.Array) -> Pair:
        # XLA alone would gather a tensor that a reshape to blocks cannot split, and could split scales over
        # a part of a mesh axis, which custom_partitioning does not support. Devices exchange one set of
        # codes of a kernel with square blocks, which serves both GEMMs.
        one, name = reference, ""
        if has_kernel and not any(size % BLOCK for size in sizes[1:]):
            one, name = partial(by_kernel, shares_codes=quantizer.serves_both), BLOCK_QUANTIZE
        letters = string.ascii_lowercase[: x.ndim]
        first, second = on_shards(one, [letters], (letters, letters), name)(x)
        return first, first if quantizer.serves_both else second

    on_gpu = partial(unless_partitioned, by_kernel if has_kernel else reference, of_parts, reference)
    return lax.platform_dependent(x, cuda=on_gpu, default=reference)


def _by_xla(cast: Cast, x: jax.Array) -> Pair:
    """Quantizes in plain JAX."""
    x = inf_to_nan(x) if cast.inf_is_nan else x
    first = cast.quantizer.quantize(x, cast.first)
    return first, first if cast.quantizer.serves_both else cast.quantizer.quantize(x, cast.second)


def _by_kernel(cast: Cast, x: jax.Array, *, shares_codes: bool = False) -> Pair:
    """Quantizes by the GPU kernel. With ``shares_codes`` both results have the codes in the same order."""
    quantizer, (batch, rows, columns) = cast.quantizer, cast.matrix(x.shape)
    along_columns, along_rows = block_quantize(
        padded(x.reshape(batch, rows, columns), (batch, round_up(rows), round_up(columns))),
        quantizer,
        inf_is_nan=cast.inf_is_nan,
    )
    if shares_codes:
        along_rows = along_columns

    def tensor(dims: Dims, codes: jax.Array, scale: jax.Array) -> QTensor:
        """Returns the tensor for a GEMM from the padded matrices."""
        block = dims.block(quantizer.block)
        blocks = tuple(-(-size // width) for size, width in zip(x.shape, block))
        _, num_rows, num_columns = cast.matrix(blocks)
        codes, scale = codes[:, :rows, :columns], scale[:, :num_rows, :num_columns]
        return QTensor(codes.reshape(x.shape), scale.reshape(blocks), quantizer, block)

    is_transposed = cast.first.contract < cast.second.contract  # the first GEMM contracts the rows
    made = (along_rows, along_columns) if is_transposed else (along_columns, along_rows)
    return tensor(cast.first, *made[0]), tensor(cast.second, *made[1])


# The GPU kernel.


def block_quantize(
    x: jax.Array, quantizer: Quantizer, *, inf_is_nan: bool = False, interpret: bool = False
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns the codes and scales of a stack of matrices, quantized along columns and along rows.

    XLA would read the matrices four times: for the amaxes of rows, for those of columns, and for two casts.
    This GPU kernel, which uses Pallas's Triton backend, reads each tile once.

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

    def kernel(x_ref: Any, codes: Any, transposed: Any, scales: Any, other_scales: Any) -> None:
        values = x_ref[...].astype(jnp.float32)
        is_finite = jnp.abs(values) <= np.finfo(np.float32).max
        finite = jnp.where(is_finite, jnp.abs(values), np.float32(0))
        if inf_is_nan:
            values = jnp.where(is_finite, values, np.float32(np.nan))
        of_rows, scale = cast(values, jnp.max(finite, axis=None if is_square else 1, keepdims=True))
        codes[...], scales[...] = of_rows, scale.T
        of_columns, scale = cast(values, jnp.max(finite, axis=None if is_square else 0, keepdims=True))
        transposed[...], other_scales[...] = of_columns.T, scale

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


def _cast(quantizer: Quantizer, values: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of float32 values, and their scale, which is computed from ``amax``."""
    bound = fp8_max(quantizer.dtype)
    scale = amax_to_scale(amax, bound, quantizer.rounding)
    values = (over_power_of_two if quantizer.rounding else divided)(values, scale)
    # Pallas's minimum and maximum return the number if the other operand is a NaN.
    saturated = jnp.where(values > bound, bound, jnp.where(values < -bound, -bound, values))
    return saturated.astype(quantizer.dtype), scale
