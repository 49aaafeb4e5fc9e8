"""Quantizes a tensor in blocks, for both GEMMs that it enters: by one GPU kernel on Hopper and Ada."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType

from fp8flax._compat.choice_at_lowering import unless_partitioned
from fp8flax._core.gemm.gpus import NATIVE_FP8, NATIVE_MX, compute_capability, has_triton
from fp8flax._core.gemm.kernels.block_quantize import block_quantize
from fp8flax._core.gemm.kernels.on_shards import quantize_on_shards
from fp8flax._core.names import BLOCK_QUANTIZE
from fp8flax._core.qtensor import BLOCK, Dims, QTensor
from fp8flax._core.quantize import inf_to_nan
from fp8flax._core.quantizers import BlockQuantizer

Pair = tuple[QTensor, QTensor]

_MAX_ELEMENTS = 2**31
"""Triton counts elements in 32 bits, so the GPU kernel takes only fewer elements than this."""


class _Cast(NamedTuple):
    """What ``quantize_blocks`` does to a tensor ``(*batch, *rows, *columns)`` (hashable)."""

    quantizer: BlockQuantizer
    first: Dims
    """What the first GEMM of the tensor contracts: its rows or its columns."""
    second: Dims
    """What the second GEMM contracts: the other ones."""
    inf_is_nan: bool

    @property
    def is_transposed(self) -> bool:
        """Returns whether the first GEMM contracts the rows."""
        return self.first.contract < self.second.contract

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns the shape of the tensor as a stack of matrices."""
        batch = self.first.num_batch
        behind = batch + len(min(self.first.contract, self.second.contract))
        return math.prod(shape[:batch]), math.prod(shape[batch:behind]), math.prod(shape[behind:])


def quantize_blocks(
    quantizer: BlockQuantizer, x: jax.Array, first: Dims, second: Dims, *, inf_is_nan: bool = False
) -> Pair:
    """Returns a tensor quantized for its first GEMM, and for its second GEMM.

    Square blocks serve both GEMMs, so both results have the same codes.

    Args:
        quantizer: the quantizer for both GEMMs.
        x: the tensor, ``(*batch, *rows, *columns)``.
        first: the dimensions that the first GEMM contracts: the rows or the columns.
        second: the dimensions that the second GEMM contracts: the other ones.
        inf_is_nan: whether an Inf becomes a NaN. Otherwise it saturates.
    """
    return _batched(_Cast(quantizer, first, second, inf_is_nan), x)


def _batched(cast: _Cast, x: jax.Array) -> Pair:
    """Quantizes a tensor; under ``jax.vmap`` the batch becomes a batch dimension."""

    @custom_vmap
    def quantize(x: jax.Array) -> Pair:
        return _quantize(cast, x)

    @quantize.def_vmap
    def _(size: int, is_batched: Any, x: jax.Array) -> Any:
        del size, is_batched
        first, second = (
            Dims(dims.ndim + 1, tuple(i + 1 for i in dims.contract), dims.num_batch + 1, dims.is_stack)
            for dims in (cast.first, cast.second)
        )
        made = _batched(cast._replace(first=first, second=second), x)
        # The blocks are those of one tensor of the batch.
        pair = tuple(dataclasses.replace(q, block=q.block[1:]) for q in made)
        return pair, jax.tree.map(lambda _: True, pair)

    pair: Pair = quantize(x)
    return pair


def _quantize(cast: _Cast, x: jax.Array) -> Pair:
    """Quantizes in the way of the device that the program is for."""
    reference = partial(_by_xla, cast)
    quantizer, capability = cast.quantizer, compute_capability()
    sizes = batch, rows, columns = cast.matrix(x.shape)
    # Under jax.export a size may be symbolic.
    is_usual = all(isinstance(size, int) and size > 0 for size in sizes)
    is_explicit = AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
    if capability == 0 or not is_usual or is_explicit or quantizer.block[0] not in (1, quantizer.block[1]):
        return reference(x)
    one = reference
    if (
        NATIVE_FP8 <= capability < NATIVE_MX  # Blackwell does not need the kernel
        and has_triton()
        and quantizer.block in ((1, BLOCK), (BLOCK, BLOCK))
        and quantizer.scale_columns is not None  # scales in float32
        and batch * (rows + BLOCK) * (columns + BLOCK) < _MAX_ELEMENTS
        and x.dtype.itemsize <= 4  # the kernel computes in float32
    ):
        one = partial(_by_kernel, cast)
    # XLA alone would gather a tensor that a reshape to blocks cannot split, and could split scales over a
    # part of a mesh axis, which custom_partitioning does not support.
    has_kernel = one is not reference and not (rows % BLOCK or columns % BLOCK)
    of_part = partial(_by_kernel, cast, shares_codes=quantizer.serves_both) if has_kernel else reference

    def on_shards(x: jax.Array) -> Pair:
        first, second = quantize_on_shards(of_part, x, name=BLOCK_QUANTIZE if has_kernel else "")
        # Devices exchange one set of codes of a kernel with square blocks, which serves both GEMMs.
        return first, first if quantizer.serves_both else second

    on_gpu = partial(unless_partitioned, one, reference, on_shards=on_shards)
    pair: Pair = lax.platform_dependent(x, cuda=on_gpu, default=reference)
    return pair


def _by_xla(cast: _Cast, x: jax.Array) -> Pair:
    """Quantizes in plain JAX."""
    x = inf_to_nan(x) if cast.inf_is_nan else x
    first = cast.quantizer.quantize(x, cast.first)
    return first, first if cast.quantizer.serves_both else cast.quantizer.quantize(x, cast.second)


def _by_kernel(cast: _Cast, x: jax.Array, *, shares_codes: bool = False) -> Pair:
    """Quantizes by the GPU kernel, which reads each tile of the tensor once; see ``block_quantize``.

    The kernel writes the codes in both orders. With ``shares_codes`` both results have those in the order
    of the tensor.
    """
    quantizer = cast.quantizer
    along_columns, transposed = block_quantize(
        x.reshape(cast.matrix(x.shape)),
        quantizer.dtype,
        is_square=quantizer.block[0] == BLOCK,
        power_2=quantizer.scale == "power_of_two",
        inf_is_nan=cast.inf_is_nan,
    )
    along_rows = along_columns if shares_codes else [jnp.swapaxes(array, 1, 2) for array in transposed]
    made = (along_rows, along_columns) if cast.is_transposed else (along_columns, along_rows)
    first, second = (_of_matrices(cast, dims, x, *of) for dims, of in zip((cast.first, cast.second), made))
    return first, second


def _of_matrices(cast: _Cast, dims: Dims, x: jax.Array, codes: jax.Array, scale: jax.Array) -> QTensor:
    """Returns the tensor from matrices of codes, which are padded to whole blocks, and their scales."""
    _, rows, columns = cast.matrix(x.shape)
    block = cast.quantizer.block_of(dims)
    blocks = [-(-size // width) for size, width in zip(x.shape, block)]
    return QTensor(codes[:, :rows, :columns].reshape(x.shape), scale.reshape(blocks), cast.quantizer, block)
