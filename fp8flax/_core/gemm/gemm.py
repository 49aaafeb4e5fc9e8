"""One GEMM: what it contracts, its sizes, and how tensors of several dimensions become matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.qtensor import Dims, QTensor
from fp8flax._core.scaling import apply_scales
from fp8flax._core.types import Accumulation

AnyTensor: TypeAlias = QTensor | jax.Array
"""An operand, quantized or wide."""

Ref: TypeAlias = Any
"""A reference to memory of the GPU, in Pallas."""

TILE = 128
"""The number of rows, and of columns, of the tiles in which our GPU kernels compute a result."""

SCALE_COLUMNS = 128
"""The number of columns that share a scale in our GPU kernels, see ``Quantizer.scale_columns``."""


class GemmSizes(NamedTuple):
    """A contraction as ``batch`` matmuls of (M, K) by (K, N)."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward pass."""
        return 2 * self.batch * self.m * self.k * self.n


class Gemm(NamedTuple):
    """One GEMM (hashable): what is contracted, and how the result is made."""

    lhs: Dims
    """What is contracted of the left operand."""
    rhs: Dims
    """What is contracted of the right operand, in the order of the left one."""
    lhs_dtype: np.dtype
    """The dtype of the left operand before it was quantized."""
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    accumulation: Accumulation = "exact"
    """For operands with scales per tensor or slice."""
    precision: lax.PrecisionLike = None
    """The ``precision`` of ``lax.dot_general``, if the GEMM does not run in FP8."""
    has_barrier: bool = False
    """Whether XLA must fuse no later operation into a call of cublasLt; see ``cublaslt``."""
    is_stored: bool = False
    """Whether the right operand is a frozen kernel, multiplied in the order in which it is stored."""

    def sizes(self, a: AnyTensor, b: AnyTensor) -> GemmSizes:
        """Returns the sizes of the matrices that are multiplied."""
        batch, m, k = self.lhs.matrices(a.shape)
        return GemmSizes(batch, m, k, self.rhs.matrices(b.shape)[1])

    @property
    def dimension_numbers(self) -> lax.DotDimensionNumbers:
        """Returns the dimension numbers of ``lax.dot_general``."""
        batch = tuple(range(self.lhs.num_batch))
        return (self.lhs.contract, self.rhs.contract), (batch, batch)


def are_positive(sizes: Iterable[int]) -> bool:
    """Returns whether all sizes are known and positive. Under ``jax.export`` a size may be symbolic."""
    return all(isinstance(size, int) and size > 0 for size in sizes)


def sum_dtype_of(*dtypes: DTypeLike) -> np.dtype:
    """Returns the dtype of sums of products: float64 if one of the dtypes is float64, otherwise float32."""
    return np.dtype(np.float64 if np.float64 in dtypes else np.float32)


def scaled(gemm: Gemm, out: jax.Array, a: QTensor, b: QTensor) -> jax.Array:
    """Returns ``out`` times the scales of both operands that multiply the result, in ``out_dtype``.

    With scales per block, ``out`` is the product of codes and these scales.
    """
    a_scale = scale_in_result(a, gemm.lhs, out.ndim, is_left=True)
    b_scale = scale_in_result(b, gemm.rhs, out.ndim, is_left=False)
    # XLA would multiply constant scales (of a closed-over model) with each other, and could overflow.
    a_scale, b_scale = (x if x.ndim else lax.optimization_barrier(x) for x in (a_scale, b_scale))
    if out.dtype == jnp.float64:  # float64 holds the product of any two float32 scales
        out = out * a_scale.astype(out.dtype) * b_scale.astype(out.dtype)
    else:
        out = apply_scales(out.astype(jnp.float32), a_scale, b_scale)
    return out.astype(gemm.out_dtype)


def scale_in_result(x: QTensor, dims: Dims, ndim: int, *, is_left: bool) -> jax.Array:
    """Returns the scales of an operand in the dimensions of the result: batch, free left, free right."""
    scale = x.tensor_scale if x.block else x.scale
    scale = jnp.ones((), jnp.float32) if scale is None else scale.astype(jnp.float32)
    if not scale.ndim:
        return scale
    batch, free = scale.shape[: dims.num_batch], [scale.shape[i] for i in dims.free]
    others = (1,) * (ndim - len(batch) - len(free))
    return scale.reshape((*batch, *free, *others) if is_left else (*batch, *others, *free))


def as_matrices(x: jax.Array, dims: Dims) -> jax.Array:
    """Returns codes, or scales, as matrices ``(batch, rows, columns)``; the columns are contracted."""
    return lax.transpose(x, dims.in_order).reshape(dims.matrices(x.shape))


def from_matrices(gemm: Gemm, a: QTensor, b: QTensor, out: jax.Array) -> jax.Array:
    """Returns the result of a GEMM, from the product ``(batch, rows, columns)`` of padded matrices."""
    _, m, _, n = gemm.sizes(a, b)
    free = (*(a.shape[i] for i in gemm.lhs.free), *(b.shape[i] for i in gemm.rhs.free))
    shape = *a.shape[: gemm.lhs.num_batch], *free
    return out[:, :m, :n].reshape(shape).astype(gemm.out_dtype)
