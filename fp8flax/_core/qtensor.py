"""Describes the operands of a GEMM: how a tensor is seen as a matrix, and its FP8 codes and scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.shapes import Float, Shaped, UInt8

BLOCK = 128
"""The number of columns that share a scale in the block scales that our GPU kernels multiply."""

TILE = BLOCK
"""The number of rows, and of columns, of the tiles in which our GPU kernels compute a result."""


class View(NamedTuple):
    """Shape of an operand, and which of its dimensions a GEMM contracts and batches (hashable)."""

    shape: tuple[int, ...]
    contract: tuple[int, ...]
    """The dimensions that are summed over."""
    batch: tuple[int, ...]
    """The batch dimensions, which both operands have."""

    @property
    def free(self) -> tuple[int, ...]:
        """Returns the dimensions that are neither contracted nor batched, in order."""
        return tuple(i for i in range(len(self.shape)) if i not in self.contract and i not in self.batch)

    def sizes(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of the given dimensions."""
        return tuple(self.shape[i] for i in dims)

    @property
    def order(self) -> tuple[int, ...]:
        """Returns the dimensions in the order ``(batch, rows, columns)`` of the GEMM's matrix."""
        return (*self.batch, *self.free, *self.contract)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Returns the sizes of ``(batch, rows, columns)``, each flattened."""
        batch, rows, columns = (math.prod(self.sizes(d)) for d in (self.batch, self.free, self.contract))
        return batch, rows, columns

    def to_matrix(self, x: Float[jax.Array, "*dims"]) -> Float[jax.Array, "batch rows columns"]:
        """Returns an operand reshaped to ``(batch, rows, columns)``."""
        return lax.transpose(x, self.order).reshape(self.matrix_shape)

    def from_matrix(self, matrix: Float[jax.Array, "batch rows columns"]) -> Float[jax.Array, "*dims"]:
        """Returns an operand in its own shape, from ``(batch, rows, columns)``."""
        return lax.transpose(matrix.reshape(self.sizes(self.order)), np.argsort(self.order))


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["quantizer"])
@dataclasses.dataclass(frozen=True)
class QTensor:
    """Quantized tensor: FP8 codes, their scales, and the quantizer that made them (``x ≈ codes * scale``).

    Attributes:
        codes: FP8 codes in the operand's shape. With scales per block the codes have the shape ``(batch,
            rows, columns)``, and zeros fill up the last block of each row and column.
        scale: a scalar, or an array of the operand's rank with size 1 in contracted dimensions, or an array
            in the layout of the quantizer.
        quantizer: the quantizer that made the codes and the scales.
    """

    codes: Float[jax.Array, "*codes"] | UInt8[jax.Array, "*codes"]
    scale: Shaped[jax.Array, "*scale"]
    quantizer: Any

    def dequantize(self, view: View, dtype: DTypeLike) -> Float[jax.Array, "*dims"]:
        """Returns the operand in its own shape and a wide dtype."""
        return self.quantizer.dequantize(self, view, dtype)

    def as_bits(self) -> QTensor:
        """Returns the same tensor with its codes, and scales of one byte, as uint8.

        ``jax.checkpoint`` passes every float that it saves through ``lax.reduce_precision``, which does not
        know e4m3fn: 448 would become NaN, and subnormals would become zero.
        """
        return dataclasses.replace(self, codes=_bits(self.codes), scale=_bits(self.scale))

    def from_bits(self) -> QTensor:
        """Returns the tensor that ``as_bits`` was called on."""
        scale = self.scale
        if scale.dtype == jnp.uint8:
            scale = lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
        codes = lax.bitcast_convert_type(self.codes, self.quantizer.dtype)
        return dataclasses.replace(self, codes=codes, scale=scale)


def _bits(x: jax.Array) -> jax.Array:
    """Returns an array of a one-byte dtype as uint8; returns an array of a wider dtype unchanged."""
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x


def dequantized(
    operand: QTensor | Float[jax.Array, "*dims"], view: View, dtype: DTypeLike
) -> Float[jax.Array, "*dims"]:
    """Returns an operand in a wide dtype, whether it was quantized or not."""
    return operand.dequantize(view, dtype) if isinstance(operand, QTensor) else operand.astype(dtype)
