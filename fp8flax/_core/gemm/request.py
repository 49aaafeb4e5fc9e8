"""Requests: hashable descriptions of GEMMs and casts.

Each request has ``reference``, its implementation in plain JAX, which runs on any device. ``lowering``
chooses how a device computes a request: in one of the ways of NVIDIA GPUs, or by ``reference``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.names import DEQUANTIZED, KEPT_WIDE
from fp8flax._core.qtensor import QTensor, View, dequantized
from fp8flax._core.quantize import inf_to_nan
from fp8flax._core.quantizers import Quantizer, quantized, serves
from fp8flax._core.scaling import apply_scales

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""The dimension numbers of ``lax.dot_general``: contracted axes, and batch axes, of both operands."""


# GEMMs.


class Gemm(NamedTuple):
    """One GEMM. Each operand is a ``QTensor`` or a wide array; the result is an array."""

    lhs: View
    rhs: View
    lhs_dtype: np.dtype
    """The dtype of the left operand before it was quantized."""
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    accumulation: str = "exact"
    """``GemmRecipe.accumulation``, for operands with scales per tensor or slice."""
    precision: Any = None
    """The ``precision`` of ``lax.dot_general``, if the GEMM does not run in FP8."""
    out_sharding: Any = None
    """The sharding of the result on a mesh with explicit axes; None if JAX can derive it."""
    has_barrier: bool = False
    """Whether XLA must fuse no later operation into a call of cublasLt; see ``cuda._apart``."""
    is_packed: bool = False
    """Whether the codes of the right operand are stored, as in a frozen model. Otherwise each call
    quantizes the right operand."""

    def reference(self, lhs: QTensor | jax.Array, rhs: QTensor | jax.Array) -> jax.Array:
        """Returns ``dot_general`` of the values of two operands, in ``out_dtype``.

        If the codes can be multiplied, scales that do not change along the contraction multiply the result.
        Otherwise the operands are multiplied by their scales first. Stored codes beside a wide operand are
        an exception: their scales multiply the result if they can.

        Args:
            lhs: a ``QTensor``, or an array that stays wide.
            rhs: a ``QTensor``, or an array that stays wide.
        """
        if not can_multiply_codes(lhs, rhs):
            return _wide_gemm(self, lhs, rhs)
        assert isinstance(lhs, QTensor)
        assert isinstance(rhs, QTensor)
        wide = sum_dtype_of(self.out_dtype)  # it holds FP8 values and their products exactly
        if lhs.quantizer.scales_along_contraction:
            return dequantized_gemm(self, lhs, rhs, wide)
        out = dot(self, lhs.codes.astype(wide), rhs.codes.astype(wide), None, wide)
        return scaled(self, out, lhs, rhs)

    @property
    def dimension_numbers(self) -> DimensionNumbers:
        """Returns the dimension numbers of ``lax.dot_general``."""
        return (self.lhs.contract, self.rhs.contract), (self.lhs.batch, self.rhs.batch)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Returns M, K and N of one matrix product of the batch."""
        return (
            math.prod(self.lhs.sizes(self.lhs.free)),
            math.prod(self.lhs.sizes(self.lhs.contract)),
            math.prod(self.rhs.sizes(self.rhs.free)),
        )

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Returns the shape of the result."""
        lhs, rhs = self.lhs, self.rhs
        return (*lhs.sizes(lhs.batch), *lhs.sizes(lhs.free), *rhs.sizes(rhs.free))

    def of_parts(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Gemm:
        """Returns the GEMM of parts of the operands, with the given shapes."""
        lhs_view, rhs_view = self.lhs._replace(shape=lhs), self.rhs._replace(shape=rhs)
        return self._replace(lhs=lhs_view, rhs=rhs_view, out_sharding=None)

    def of_matrices(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Gemm:
        """Returns the GEMM of two stacks of matrices, ``(batch, M, K)`` times ``(batch, N, K)``."""
        return self._replace(lhs=View(lhs, (2,), (0,)), rhs=View(rhs, (2,), (0,)), out_sharding=None)

    def unpadded(self, out: jax.Array) -> jax.Array:
        """Turns a product ``(batch, rows, columns)`` of padded matrices into the result of the GEMM.

        Returns the product without its padding, in the shape and dtype of the result.
        """
        _, rows, _ = self.lhs.matrix_shape
        _, columns, _ = self.rhs.matrix_shape
        return out[:, :rows, :columns].reshape(self.out_shape).astype(self.out_dtype)


def sum_dtype_of(*dtypes: Any) -> np.dtype:
    """Returns the dtype of sums of products: float64 if one of the dtypes is float64, otherwise float32."""
    return np.dtype(np.float64 if np.float64 in dtypes else np.float32)


def can_multiply_codes(lhs: Any, rhs: Any) -> bool:
    """Returns whether a GEMM can multiply the FP8 codes of its operands.

    Both operands must be quantized, and their scales must either both change along the contraction or both
    not change.
    """
    return (
        isinstance(lhs, QTensor)
        and isinstance(rhs, QTensor)
        and lhs.quantizer.scales_along_contraction == rhs.quantizer.scales_along_contraction
    )


def _wide_gemm(gemm: Gemm, lhs: QTensor | jax.Array, rhs: QTensor | jax.Array) -> jax.Array:
    """Multiplies in the dtypes that the operands had before they were quantized; dequantizes if needed."""
    is_kept = not (isinstance(lhs, QTensor) and isinstance(rhs, QTensor))
    with jax.named_scope(KEPT_WIDE if is_kept else DEQUANTIZED):
        if (
            gemm.is_packed
            and isinstance(rhs, QTensor)
            and not isinstance(lhs, QTensor)
            and not rhs.quantizer.scales_along_contraction
        ):
            return _wide_by_stored_codes(gemm, lhs, rhs)
        return lax.dot_general(
            dequantized(lhs, gemm.lhs, gemm.lhs_dtype),
            dequantized(rhs, gemm.rhs, gemm.rhs_dtype),
            gemm.dimension_numbers,
            gemm.precision,
            preferred_element_type=gemm.out_dtype,
            out_sharding=gemm.out_sharding,
        )


def _wide_by_stored_codes(gemm: Gemm, lhs: jax.Array, rhs: QTensor) -> jax.Array:
    """Multiplies a wide operand by stored FP8 codes, and then multiplies the result by their scales.

    XLA then reads the FP8 codes in its GEMM. If the codes were multiplied by the scales first, XLA would
    write the wide kernel to memory.
    """
    wide = sum_dtype_of(lhs.dtype, gemm.out_dtype)
    out = lax.dot_general(
        lhs,
        rhs.codes.astype(lhs.dtype),
        gemm.dimension_numbers,
        gemm.precision,  # None takes jax.default_matmul_precision, as for other wide GEMMs
        preferred_element_type=wide,
        out_sharding=gemm.out_sharding,
    )
    return (out * _as_columns(gemm, rhs.scale).astype(wide)).astype(gemm.out_dtype)


def dequantized_gemm(gemm: Gemm, lhs: QTensor, rhs: QTensor, dtype: Any) -> jax.Array:
    """Dequantizes both operands to a wide dtype and multiplies them."""
    operands = lhs.dequantize(gemm.lhs, dtype), rhs.dequantize(gemm.rhs, dtype)
    sum_dtype = sum_dtype_of(dtype)
    # GPUs would round operands in float32 to TF32.
    precision = lax.Precision.HIGHEST if dtype == sum_dtype else None
    with jax.named_scope(DEQUANTIZED):
        return dot(gemm, *operands, precision, sum_dtype).astype(gemm.out_dtype)


def scaled(gemm: Gemm, out: jax.Array, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies ``out``, the product of the codes, by the scales of both operands.

    Returns the result in ``gemm.out_dtype``.
    """
    lhs_scale = _as_rows(gemm, lhs.scale.astype(jnp.float32))
    rhs_scale = _as_columns(gemm, rhs.scale.astype(jnp.float32))
    if not lhs_scale.ndim:
        # XLA would multiply two constant scales (of a closed-over model), and could overflow.
        lhs_scale = lax.optimization_barrier(lhs_scale)
    if out.dtype == jnp.float64:  # float64 holds the product of any two float32 scales
        out = out * lhs_scale.astype(out.dtype) * rhs_scale.astype(out.dtype)
    else:
        out = apply_scales(out, lhs_scale, rhs_scale)
    return out.astype(gemm.out_dtype)


def _as_rows(gemm: Gemm, scale: jax.Array) -> jax.Array:
    """Reshapes the scales of the left operand so that they broadcast against the result of the GEMM."""
    if not scale.ndim:
        return scale
    batch, rows = gemm.lhs.sizes(gemm.lhs.batch), gemm.lhs.sizes(gemm.lhs.free)
    return lax.transpose(scale, gemm.lhs.order).reshape(*batch, *rows, *(1 for _ in gemm.rhs.free))


def _as_columns(gemm: Gemm, scale: jax.Array) -> jax.Array:
    """Reshapes the scales of the right operand so that they broadcast against the result of the GEMM."""
    if not scale.ndim:
        return scale
    batch, columns = gemm.rhs.sizes(gemm.rhs.batch), gemm.rhs.sizes(gemm.rhs.free)
    return lax.transpose(scale, gemm.rhs.order).reshape(*batch, *(1 for _ in gemm.lhs.free), *columns)


_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))
# The smallest M, K and N for which ``dot`` multiplies rows in pairs. A smaller size, split over many
# devices, could leave a device with a single row, for which XLA cannot compile the algorithm.
_MIN_FOR_PAIRS = 256


def dot(gemm: Gemm, lhs: jax.Array, rhs: jax.Array, precision: Any, sum_dtype: Any) -> jax.Array:
    """Returns ``lax.dot_general`` of two arrays, with the dimension numbers and sharding of ``gemm``.

    Args:
        gemm: what is multiplied.
        lhs: the left operand: wide values or FP8 codes.
        rhs: the right operand: wide values or FP8 codes.
        precision: the precision or algorithm of ``lax.dot_general``; None for the default of XLA.
        sum_dtype: dtype of the sums and of the result.
    """
    dims = gemm.dimension_numbers
    # Workaround: XLA's partitioner (Shardy) drops the algorithm of a product of two matrices, and XLA would
    # then not use cublasLt. Rows are multiplied in pairs to avoid that form. (A transposed operand also
    # avoids it, but is gathered once more.)
    is_lost = dims == _ROWS_BY_COLUMNS and precision is not None and lhs.dtype.itemsize == 1
    in_pairs = (
        is_lost
        and gemm.out_sharding is None
        # Under jax.export a size may be symbolic.
        and all(isinstance(size, int) and size >= _MIN_FOR_PAIRS for size in gemm.sizes)
        and lhs.shape[0] % (2 * _num_parts(lhs)) == 0
    )
    if in_pairs:
        lhs, dims = lhs.reshape(-1, 2, lhs.shape[1]), (((2,), (0,)), ((), ()))
    out = lax.dot_general(
        lhs,
        rhs,
        dims,
        # Not None: None would take the precision of jax.default_matmul_precision.
        lax.Precision.DEFAULT if precision is None else precision,
        preferred_element_type=sum_dtype,
        out_sharding=gemm.out_sharding,
    )
    return out.reshape(-1, out.shape[-1]) if in_pairs else out


def _num_parts(x: jax.Array) -> int:
    """Returns the number of parts into which explicit mesh axes split the first dimension of ``x``."""
    sharding = jax.typeof(x).sharding
    names = sharding.spec[0] or ()
    return math.prod(sharding.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))


# Products with the kernels of experts.


class ExpertProducts(NamedTuple):
    """Each row of the input, multiplied by the kernel of the expert that the row belongs to.

    The operands are rows ``(rows, depth)``, kernels ``(experts, columns, depth)``, and the number of rows
    of each expert ``(experts,)``.
    """

    shape: tuple[int, int]
    """Rows and columns of the result. The result is zero in rows that belong to no expert."""
    dtype: np.dtype
    """The dtype of the result."""
    reference: Callable[..., jax.Array]
    """The reference implementation, which multiplies one tile of rows after the other. It is called with
    the operands, and with ``is_part=True`` if these are the parts of one device of a mesh."""
    transposes_kernels: bool = False
    """Whether the kernels come as ``(experts, depth, columns)``, and each device transposes its own. Codes
    with scales per block come as ``(experts, columns, depth)`` even then."""


def transposed_kernels(kernels: Any) -> Any:
    """Swaps rows and columns of the kernels of experts; scales with one element per kernel stay."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2) if x.ndim == 3 else x, kernels)


class ExpertSums(NamedTuple):
    """For each expert, the sum of the outer products of its rows of both operands.

    The operands are ``(rows, depth)``, ``(rows, columns)``, and the number of rows of each expert
    ``(experts,)``.
    """

    shape: tuple[int, int, int]
    """Experts, depth and columns of the result."""
    dtype: np.dtype
    """The dtype of the result."""
    reference: Callable[..., jax.Array]
    """The reference implementation, see ``ExpertProducts.reference``."""


# A cast for two GEMMs.


class CastPair(NamedTuple):
    """A tensor, quantized for each of the two GEMMs that it enters.

    The operands are the tensor, of shape ``first_view.shape``, and its scale, which is None without delayed
    scaling. The result is a pair: the tensor as operand of the first GEMM and of the second GEMM.
    """

    first: Quantizer | None
    """The quantizer for the first GEMM; None leaves the tensor wide."""
    first_view: View
    """The view of the tensor in the first GEMM."""
    second: Quantizer | None
    """The quantizer for the second GEMM; None leaves the tensor wide."""
    second_view: View
    """The view of the tensor in the second GEMM."""
    inf_is_nan: bool = False
    """Whether an Inf becomes a NaN. Otherwise it saturates."""
    stack: int = 1
    """Number of tensors that ``jax.vmap`` stacks, such as the kernels of experts."""
    has_barrier: bool = False
    """Whether the codes are returned behind a barrier, so that XLA does not cast the tensor again for a
    GEMM that takes it transposed."""

    def reference(self, x: jax.Array, scale: jax.Array | None) -> tuple[Any, Any]:
        """Quantizes a tensor for two GEMMs: once if both GEMMs can use the same codes, otherwise twice."""
        x = inf_to_nan(x) if self.inf_is_nan else x
        if not serves(self.first, self.second, self.first_view):
            first = quantized(self.first, x, self.first_view, scale)
            return behind_barrier(self, first, quantized(self.second, x, self.second_view, scale))
        # The codes are made in the order of the tensor's dimensions, because devices of a mesh exchange
        # codes in that order; see ``gemm_on_shards``.
        is_second = list(self.second_view.order) == sorted(self.second_view.order)
        made = quantized(self.first, x, self.second_view if is_second else self.first_view, scale)
        other = made.quantizer.transpose(made) if isinstance(made, QTensor) else made
        return behind_barrier(self, *((other, made) if is_second else (made, other)))


def behind_barrier(request: CastPair, first: Any, second: Any) -> tuple[Any, Any]:
    """Returns both operands; if the request ``has_barrier``, their codes are behind one barrier."""
    if not request.has_barrier:
        return first, second
    return with_codes((first, second), lax.optimization_barrier(distinct_codes((first, second))))


def distinct_codes(pair: tuple[Any, Any]) -> list[jax.Array]:
    """Returns the codes of two operands; codes that both operands have are returned once."""
    return list({id(q.codes): q.codes for q in pair if isinstance(q, QTensor)}.values())


def with_codes(pair: tuple[Any, Any], codes: list[jax.Array]) -> tuple[Any, Any]:
    """Returns two operands with other codes, which are in the order of ``distinct_codes``."""
    new = dict(zip(map(id, distinct_codes(pair)), codes, strict=True))
    first, second = (
        dataclasses.replace(q, codes=new[id(q.codes)]) if isinstance(q, QTensor) else q for q in pair
    )
    return first, second
