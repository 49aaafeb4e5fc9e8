"""Reference implementations of the requests, in plain JAX, for any device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._core.amax import amaxes_of_parts
from fp8flax._core.gemm.request import Cast, CastPair, CastTranspose, Gemm, cast_grid, is_of_codes
from fp8flax._core.names import DEQUANTIZED, KEPT_WIDE, QDQ
from fp8flax._core.qtensor import QTensor, dequantized
from fp8flax._core.quantize import inf_to_nan, quantize
from fp8flax._core.quantizers import quantized, serves
from fp8flax._core.scaling import apply_scales

_OF_MATRICES = (((1,), (0,)), ((), ()))
# The smallest M, K and N for which ``dot`` multiplies rows in pairs. A smaller size, split over many
# devices, could leave a device with a single row, for which XLA cannot compile the algorithm.
_MANY = 256


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
    is_lost = dims == _OF_MATRICES and isinstance(precision, lax.DotAlgorithmPreset)
    in_pairs = is_lost and min(gemm.sizes) >= _MANY and lhs.shape[0] % (2 * _num_parts(lhs)) == 0
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


def reference_gemm(gemm: Gemm, lhs: QTensor | jax.Array, rhs: QTensor | jax.Array) -> jax.Array:
    """Returns ``dot_general`` of the values of two operands, in ``gemm.out_dtype``.

    Scales that do not change along the contraction multiply the result; others are applied to the operands.

    Args:
        gemm: what is multiplied.
        lhs: a ``QTensor``, or an array that stays wide.
        rhs: a ``QTensor``, or an array that stays wide.
    """
    if not is_of_codes(gemm, lhs, rhs):
        return _wide_gemm(gemm, lhs, rhs)
    assert isinstance(lhs, QTensor)
    assert isinstance(rhs, QTensor)
    # Float32 holds FP8 values and their products exactly.
    wide = jnp.dtype(jnp.float64 if gemm.out_dtype == jnp.float64 else jnp.float32)
    if lhs.quantizer.scales_along_contraction:
        return dequantized_gemm(gemm, lhs, rhs, wide)
    out = dot(gemm, lhs.codes.astype(wide), rhs.codes.astype(wide), None, wide)
    return scaled(gemm, out, lhs, rhs)


def _wide_gemm(gemm: Gemm, lhs: QTensor | jax.Array, rhs: QTensor | jax.Array) -> jax.Array:
    """Multiplies in the dtypes that the operands had before they were quantized; dequantizes if needed."""
    is_kept = not (isinstance(lhs, QTensor) and isinstance(rhs, QTensor))
    if isinstance(rhs, QTensor) and not isinstance(lhs, QTensor) and _is_by_codes(gemm, rhs):
        with jax.named_scope(KEPT_WIDE):
            return _wide_by_codes(gemm, lhs, rhs)
    with jax.named_scope(KEPT_WIDE if is_kept else QDQ if gemm.dequantized else DEQUANTIZED):
        return lax.dot_general(
            dequantized(lhs, gemm.lhs, gemm.lhs_dtype),
            dequantized(rhs, gemm.rhs, gemm.rhs_dtype),
            gemm.dimension_numbers,
            gemm.precision,
            preferred_element_type=gemm.out_dtype,
            out_sharding=gemm.out_sharding,
        )


def _is_by_codes(gemm: Gemm, rhs: QTensor) -> bool:
    """Returns whether a wide GEMM multiplies by the stored codes of ``rhs`` and scales the result."""
    return gemm.is_packed and not gemm.dequantized and not rhs.quantizer.scales_along_contraction


def _wide_by_codes(gemm: Gemm, lhs: jax.Array, rhs: QTensor) -> jax.Array:
    """Multiplies a wide operand by stored FP8 codes, and then multiplies the result by their scales.

    XLA then reads the FP8 codes in its GEMM. If the codes were multiplied by the scales first, XLA would
    write the wide kernel to memory.
    """
    wide = jnp.dtype(jnp.float64 if jnp.float64 in (lhs.dtype, gemm.out_dtype) else jnp.float32)
    out = dot(gemm, lhs, rhs.codes.astype(lhs.dtype), gemm.precision, wide)
    return (out * _as_columns(gemm, rhs.scale).astype(wide)).astype(gemm.out_dtype)


def dequantized_gemm(gemm: Gemm, lhs: QTensor, rhs: QTensor, dtype: Any) -> jax.Array:
    """Dequantizes both operands to a wide dtype and multiplies them."""
    operands = lhs.dequantize(gemm.lhs, dtype), rhs.dequantize(gemm.rhs, dtype)
    sum_dtype = jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    precision = lax.Precision.HIGHEST if dtype == sum_dtype else None
    with jax.named_scope(DEQUANTIZED):
        return dot(gemm, *operands, precision, sum_dtype).astype(gemm.out_dtype)


def scaled(gemm: Gemm, out: jax.Array, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies ``out``, the product of the codes, by the scales of both operands.

    Returns the result in ``gemm.out_dtype``.
    """
    lhs_scale, rhs_scale = lhs.scale.astype(jnp.float32), rhs.scale.astype(jnp.float32)
    batch = gemm.lhs.sizes(gemm.lhs.batch)
    rows, columns = gemm.lhs.sizes(gemm.lhs.free), gemm.rhs.sizes(gemm.rhs.free)
    if lhs_scale.ndim:
        lhs_scale = lax.transpose(lhs_scale, gemm.lhs.order)
        lhs_scale = lhs_scale.reshape(*batch, *rows, *(1 for _ in columns))
    else:  # If both scales are constants, as in a closed-over model, XLA would fold their product.
        lhs_scale = lax.optimization_barrier(lhs_scale)
    rhs_scale = _as_columns(gemm, rhs_scale)
    if out.dtype == jnp.float64:  # float64 holds the product of any two float32 scales
        out = out * lhs_scale.astype(out.dtype) * rhs_scale.astype(out.dtype)
    else:
        out = apply_scales(out, lhs_scale, rhs_scale)
    return out.astype(gemm.out_dtype)


def _as_columns(gemm: Gemm, scale: jax.Array) -> jax.Array:
    """Reshapes the scales of the right operand so that they broadcast against the result of the GEMM."""
    if not scale.ndim:
        return scale
    batch, columns = gemm.rhs.sizes(gemm.rhs.batch), gemm.rhs.sizes(gemm.rhs.free)
    return lax.transpose(scale, gemm.rhs.order).reshape(*batch, *(1 for _ in gemm.lhs.free), *columns)


def reference_pair(request: CastPair, x: jax.Array, scale: jax.Array | None) -> tuple[Any, Any]:
    """Quantizes a tensor for two GEMMs: once if both GEMMs can use the same codes, otherwise twice."""
    x = inf_to_nan(x) if request.inf_is_nan else x
    if not serves(request.first, request.second, request.view):
        first = quantized(request.first, x, request.view, scale)
        return behind_barrier(request, first, quantized(request.second, x, request.other_view, scale))
    # Made in the order of the tensor, in which devices of a mesh exchange codes, see ``gemm_on_shards``.
    is_second = list(request.other_view.order) == sorted(request.other_view.order)
    made = quantized(request.first, x, request.other_view if is_second else request.view, scale)
    other = made.quantizer.transpose(made) if isinstance(made, QTensor) else made
    return behind_barrier(request, *((other, made) if is_second else (made, other)))


def behind_barrier(request: CastPair, first: Any, second: Any) -> tuple[Any, Any]:
    """Returns both operands; if the request ``has_barrier``, their codes are behind one barrier."""
    if not request.has_barrier:
        return first, second
    pair = first, second
    codes = lax.optimization_barrier([q.codes if isinstance(q, QTensor) else None for q in pair])
    first, second = (
        dataclasses.replace(q, codes=c) if isinstance(q, QTensor) else q for q, c in zip(pair, codes)
    )
    return first, second


def reference_cast(request: CastTranspose, scales: Sequence[jax.Array], *args: jax.Array) -> list[Cast]:
    """Casts each result of the elementwise function ``request.f`` to FP8 codes, and transposes the codes.

    Args:
        request: the function, and the FP8 dtype of each of its results.
        scales: the scale of each result, a float32 scalar.
        *args: the arguments of the function; the first one has the shape ``(M, N)`` of the results.
    """
    results = []
    grid = cast_grid(*args[0].shape)
    num_parts = None if grid is None else math.prod(grid)  # the GPU kernel returns as many
    wide = request.f(*(arg.astype(jnp.float32) for arg in args))
    for x, dtype, scale in zip(wide, request.dtypes, scales):
        amaxes, codes = amaxes_of_parts(x, None, quantize(x, dtype, scale), num_parts=num_parts)
        sums = jnp.sum(x, axis=0) if request.has_sums else None
        results.append(Cast(codes, codes.T, amaxes, sums))
    return results
