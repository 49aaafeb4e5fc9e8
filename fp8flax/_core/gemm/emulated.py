"""Multiplies without FP8 units, on any device: wide operands, and the values of FP8 operands."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.gemm.gemm import AnyTensor, Gemm, scale_in_result, scaled, sum_dtype_of
from fp8flax._core.names import DEQUANTIZED
from fp8flax._core.qtensor import QTensor, dequantized


def multiply_wide(scope: str, gemm: Gemm, a: AnyTensor, b: AnyTensor) -> jax.Array:
    """Multiplies in the dtypes that the operands had before they were quantized; dequantizes if needed.

    By ``scope`` the audit says why.
    """
    dot = partial(gemm.dot, precision=gemm.precision)  # None takes jax.default_matmul_precision
    with jax.named_scope(scope):
        if gemm.is_stored and isinstance(b, QTensor) and not isinstance(a, QTensor) and not b.block:
            # The scales multiply the result, so XLA reads the FP8 codes in its GEMM. If the codes were
            # multiplied by the scales first, XLA would write the wide kernel to memory.
            wide = sum_dtype_of(a.dtype, gemm.out_dtype)
            out = dot(a, b.codes.astype(a.dtype), wide)
            scale = scale_in_result(b, gemm.rhs, out.ndim, is_left=False)
            return (out * scale.astype(wide)).astype(gemm.out_dtype)
        return dot(dequantized(a, gemm.lhs_dtype), dequantized(b, gemm.rhs_dtype), gemm.out_dtype)


def reference(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies in float32 (in float64 for a float64 result): codes, or dequantized values of blocks.

    Float32 holds the products of codes exactly. Their sums are then multiplied by the scales.
    """
    wide = sum_dtype_of(gemm.out_dtype)
    if a.block:
        return _dequantized(gemm, wide, a, b)
    return scaled(gemm, gemm.dot(a.codes.astype(wide), b.codes.astype(wide), wide), a, b)


def supports(*case: object) -> bool:
    """Returns True: every device multiplies all operands so."""
    return True


def compute(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies on a GPU without units for these operands: in bfloat16, if it holds the values of blocks.

    All other operands are multiplied as by ``reference``.
    """
    if not a.block:
        return reference(gemm, a, b)
    is_exact = a.quantizer.is_exact_in_bfloat16 and b.quantizer.is_exact_in_bfloat16
    return _dequantized(gemm, jnp.bfloat16 if is_exact else jnp.float32, a, b)


def _dequantized(gemm: Gemm, dtype: DTypeLike, a: QTensor, b: QTensor) -> jax.Array:
    """Dequantizes both operands to a wide dtype and multiplies them."""
    sum_dtype = sum_dtype_of(dtype)
    # GPUs would round operands in float32 to TF32.
    precision = lax.Precision.HIGHEST if dtype == sum_dtype else lax.Precision.DEFAULT
    wide = Gemm(gemm.lhs, gemm.rhs, dtype, dtype, sum_dtype, precision=precision)
    return multiply_wide(DEQUANTIZED, wide, a, b).astype(gemm.out_dtype)
