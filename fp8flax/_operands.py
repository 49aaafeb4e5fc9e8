"""Operands of a GEMM: quantized as a recipe says, along the contraction, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._formats import fp8_max
from fp8flax._quantize import quantize
from fp8flax._recipes import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, Quantizer
from fp8flax._scaling import (
    current_scale,
    e8m0_factors,
    e8m0_scale,
    finite_amax,
    power_of_two,
    scale_exponent,
)

MX_COLUMNS = 32
"""Columns that share a scale where hardware multiplies block-scaled operands."""


class Quantized(NamedTuple):
    """FP8 codes with their scales: ``x ≈ codes * scale``."""

    codes: jax.Array
    """Of the operand's shape; for blocks ``(batch, rows, columns)``, zeros filling up the last blocks."""
    scale: jax.Array
    """A scalar; or of the operand's rank, contracted dimensions at size 1; or one per block, float32 or
    ``float8_e8m0fnu``."""


class View(NamedTuple):
    """How an operand enters a GEMM (hashable)."""

    shape: tuple[int, ...]
    contract: tuple[int, ...]
    batch: tuple[int, ...]

    @property
    def free(self) -> tuple[int, ...]:
        """The dimensions that are neither contracted nor batched, in order."""
        return tuple(i for i in range(len(self.shape)) if i not in self.contract and i not in self.batch)

    def sizes(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of these dimensions."""
        return tuple(self.shape[i] for i in dims)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions as ``(batch, rows, columns)`` of the matrix that the GEMM sees."""
        return (*self.batch, *self.free, *self.contract)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Sizes of ``(batch, rows, columns)``, each flattened."""
        batch, rows, columns = (math.prod(self.sizes(d)) for d in (self.batch, self.free, self.contract))
        return batch, rows, columns


def is_blockwise(quantizer: Quantizer | None) -> bool:
    """Tells whether the scale changes along the contraction."""
    return isinstance(quantizer, BlockQuantizer)


def swaps_with(quantizer: Quantizer | None, other: Quantizer | None, view: View) -> bool:
    """Tells whether the codes for one of an operand's GEMMs serve the other, which sums over its rows.

    ``view`` is that of the first. Where they do not, the operand is quantized again, from the wide tensor.
    """
    if quantizer != other:
        return False
    if isinstance(quantizer, CurrentQuantizer):
        return quantizer.granularity == "tensorwise"
    if isinstance(quantizer, BlockQuantizer):
        # The other GEMM flattens in ascending order what this one sums over.
        return quantizer.block[0] == quantizer.block[1] and list(view.contract) == sorted(view.contract)
    return True


def swapped(operand: Any, quantizer: Quantizer | None) -> Any:
    """Returns the operand for the other GEMM, given that ``swaps_with`` holds."""
    if isinstance(quantizer, BlockQuantizer):
        return Quantized(*(jnp.swapaxes(x, 1, 2) for x in operand))
    return operand


def quantize_operand(
    quantizer: Quantizer | None, x: jax.Array, view: View, delayed_scale: jax.Array | None = None
) -> Quantized | jax.Array:
    """Quantizes an operand for one GEMM.

    Args:
        quantizer: how; None returns ``x``.
        x: the wide operand, of shape ``view.shape``.
        view: which dimensions the GEMM contracts.
        delayed_scale: the scale of a ``DelayedQuantizer``, one element.

    NaN stays NaN; an Inf saturates, and neither has a say in the scales of current and block scaling.
    """
    if quantizer is None:
        return x
    if isinstance(quantizer, DelayedQuantizer):
        assert delayed_scale is not None
        scale = delayed_scale.reshape(())
        return Quantized(quantize(x, quantizer.dtype, scale), scale)
    if isinstance(quantizer, CurrentQuantizer):
        axes = None if quantizer.granularity == "tensorwise" else view.contract
        amax = finite_amax(x, axes)
        if quantizer.amax_epsilon:
            amax = jnp.maximum(amax, np.float32(quantizer.amax_epsilon))
        scale = current_scale(amax, fp8_max(quantizer.dtype), power_2=quantizer.use_power_2_scales)
        return Quantized(quantize(x, quantizer.dtype, scale), scale)
    return _quantize_blocks(quantizer, x, view)


def _quantize_blocks(quantizer: BlockQuantizer, x: jax.Array, view: View) -> Quantized:
    matrix = lax.transpose(x, view.order).reshape(view.matrix_shape)
    (num_rows, num_columns), (height, width) = _num_blocks(quantizer, view), quantizer.block
    padded = _fill_blocks(quantizer, matrix, view)
    blocks = padded.reshape(matrix.shape[0], num_rows, height, num_columns, width)
    limit = fp8_max(quantizer.dtype)
    amax = finite_amax(blocks, (2, 4))
    if quantizer.scale == "float32":
        scale = current_scale(amax, limit)
        codes = quantize(blocks, quantizer.dtype, scale)
    else:
        lowest = -127 if quantizer.scale == "e8m0" else -126
        exponent = scale_exponent(amax, limit, quantizer.scale_rounding)
        # By the reciprocal, which is exact: 2**-127 is a subnormal number, 2**127 is not.
        inverse = power_of_two(-jnp.maximum(exponent, np.int32(lowest)))
        codes = quantize(blocks.astype(jnp.float32) * inverse, quantizer.dtype, 1.0)
        scale = e8m0_scale(exponent) if quantizer.scale == "e8m0" else power_of_two(exponent)
    return Quantized(codes.reshape(padded.shape), scale.reshape(matrix.shape[0], num_rows, num_columns))


def without_padding(quantizer: Quantizer | None, operand: Quantized, view: View) -> Quantized:
    """Returns a blockwise operand without the zeros that fill up its last blocks; others as they are."""
    if not is_blockwise(quantizer):
        return operand
    _, rows, columns = view.matrix_shape
    return operand._replace(codes=operand.codes[:, :rows, :columns])


def with_padding(quantizer: Quantizer | None, operand: Quantized, view: View) -> Quantized:
    """Returns what ``without_padding`` was given."""
    if not isinstance(quantizer, BlockQuantizer):
        return operand
    return operand._replace(codes=_fill_blocks(quantizer, operand.codes, view))


def _fill_blocks(quantizer: BlockQuantizer, matrix: jax.Array, view: View) -> jax.Array:
    """Pads with zeros, which no amax sees and no sum."""
    _, rows, columns = view.matrix_shape
    (num_rows, num_columns), (height, width) = _num_blocks(quantizer, view), quantizer.block
    padding = ((0, 0, 0), (0, num_rows * height - rows, 0), (0, num_columns * width - columns, 0))
    return lax.pad(matrix, jnp.zeros((), matrix.dtype), padding)


def _num_blocks(quantizer: BlockQuantizer, view: View) -> tuple[int, int]:
    _, rows, columns = view.matrix_shape
    height, width = quantizer.block
    return -(-rows // height), -(-columns // width)


def dequantize_operand(
    quantizer: Quantizer | None, operand: Quantized | jax.Array, view: View, dtype: Any
) -> jax.Array:
    """Returns the operand in its own shape and a wide dtype; multiplied in float32 and rounded once."""
    if quantizer is None:
        assert not isinstance(operand, Quantized)
        return operand.astype(dtype)
    assert isinstance(operand, Quantized)
    compute_dtype = jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    # The barrier keeps the FP8 values: on GPUs XLA takes a cast to a narrower float and back for nothing.
    values = lax.optimization_barrier(operand.codes).astype(compute_dtype)
    if not isinstance(quantizer, BlockQuantizer):
        return (values * operand.scale.astype(compute_dtype)).astype(dtype)
    (num_rows, num_columns), (height, width) = _num_blocks(quantizer, view), quantizer.block
    batch, rows, columns = view.matrix_shape
    values = values.reshape(batch, num_rows, height, num_columns, width)
    is_e8m0 = operand.scale.dtype == jnp.float8_e8m0fnu
    for factor in e8m0_factors(operand.scale) if is_e8m0 else (operand.scale,):
        values = values * factor.astype(compute_dtype)[:, :, None, :, None]
    matrix = values.reshape(batch, num_rows * height, num_columns * width)[:, :rows, :columns]
    order = view.order
    unflattened = matrix.reshape(view.sizes(order))
    return lax.transpose(unflattened, np.argsort(order)).astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def straight_through(
    quantizer: Quantizer | None, view: View, x: jax.Array, delayed_scale: jax.Array | None
) -> jax.Array:
    """Returns an operand with the values that FP8 leaves of it, and with its own derivative."""
    return dequantize_operand(quantizer, quantize_operand(quantizer, x, view, delayed_scale), view, x.dtype)


@straight_through.defjvp
def _straight_through_jvp(quantizer: Any, view: View, primals: Any, tangents: Any) -> Any:
    return straight_through(quantizer, view, *primals), tangents[0]


def apply_scales(total: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array) -> jax.Array:
    """Returns ``total * lhs_scale * rhs_scale`` in float32, right wherever that is in its range.

    Not so the product of the scales, nor a sum times the larger of them, such as 1e6 times 1e34. Of a very
    large or very small first scale a power of two therefore comes last; that changes no bit of the rest.

    Args:
        total: sums of products of FP8 codes, in magnitude 0 or from 2**-32 to 2**47.
        lhs_scale: float32, as normal numbers; broadcasts with it.
        rhs_scale: likewise.
    """
    # With what is left for last, the first product is in the range; and where that is not 1, it is far from
    # the end to which the second scale could take it only to be brought back.
    left = jnp.where(lhs_scale >= 2.0**80, 2.0**48, jnp.where(lhs_scale < 2.0**-94, 2.0**-32, 1.0))
    return total * (lhs_scale / left) * rhs_scale * left


def stored(quantizer: Quantizer, operand: Quantized, view: View) -> Quantized:
    """Returns a quantized operand with its codes in the operand's own shape, however its scales lie."""
    if not isinstance(quantizer, BlockQuantizer):
        return operand
    codes = without_padding(quantizer, operand, view).codes.reshape(view.sizes(view.order))
    return operand._replace(codes=lax.transpose(codes, np.argsort(view.order)))


def unstored(quantizer: Quantizer, operand: Quantized, view: View) -> Quantized:
    """Returns what ``stored`` was given."""
    if not isinstance(quantizer, BlockQuantizer):
        return operand
    codes = lax.transpose(operand.codes, view.order).reshape(view.matrix_shape)
    return with_padding(quantizer, operand._replace(codes=codes), view)


def mx_operand(quantizer: BlockQuantizer, operand: Quantized) -> Quantized:
    """Returns a blockwise operand with an E8M0 scale per 32 columns of each row: the same values.

    The scales must be powers of two, the blocks' columns a multiple of 32 (``MX_COLUMNS``).
    """
    scale = operand.scale
    if scale.dtype != jnp.float8_e8m0fnu:
        exponent = lax.bitcast_convert_type(scale, jnp.int32) >> np.int32(23)
        scale = lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)
    height, width = quantizer.block
    codes = lax.bitcast_convert_type(scale, jnp.uint8)
    codes = jnp.repeat(jnp.repeat(codes, height, axis=1), width // MX_COLUMNS, axis=2)
    return Quantized(operand.codes, lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu))
