"""Multiplies without FP8 units, on any device: wide operands, and the values of FP8 operands."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.gemm.gemm import AnyTensor, Gemm, scale_in_result, scaled, sum_dtype_of
from fp8flax._core.names import DEQUANTIZED
from fp8flax._core.qtensor import QTensor, dequantized


def multiply_wide(scope: str, gemm: Gemm, a: AnyTensor, b: AnyTensor) -> jax.Array:
    """Multiplies in the dtypes that the operands had before they were quantized; dequantizes if needed.

    By ``scope`` the audit says why.
    """
    # The precision None takes jax.default_matmul_precision.
    dot = partial(lax.dot_general, dimension_numbers=gemm.dimension_numbers, precision=gemm.precision)
    with jax.named_scope(scope):
        if gemm.is_stored and isinstance(b, QTensor) and not isinstance(a, QTensor) and not b.block:
            # The scales multiply the result, so XLA reads the FP8 codes in its GEMM. If the codes were
            # multiplied by the scales first, XLA would write the wide kernel to memory.
            wide = sum_dtype_of(a.dtype, gemm.out_dtype)
            out = dot(a, b.codes.astype(a.dtype), preferred_element_type=wide)
            scale = scale_in_result(b, gemm.rhs, out.ndim, is_left=False)
            return (out * scale.astype(wide)).astype(gemm.out_dtype)
        a, b = dequantized(a, gemm.lhs_dtype), dequantized(b, gemm.rhs_dtype)
        return dot(a, b, preferred_element_type=gemm.out_dtype)


def compute(gemm: Gemm, a: QTensor, b: QTensor, *, on_gpu: bool = True) -> jax.Array:
    """Multiplies the codes, or with scales per block the dequantized values.

    Codes are multiplied in float32 (float64 for a float64 result), which holds their products exactly. So
    are the values of blocks, but a GPU multiplies them in bfloat16, or in float32 if that is not exact.
    """
    wide = dtype = sum_dtype_of(gemm.out_dtype)
    if not a.block:
        codes = a.codes.astype(wide), b.codes.astype(wide)
        precision = lax.Precision.DEFAULT
        out = lax.dot_general(*codes, gemm.dimension_numbers, precision, preferred_element_type=wide)
        return scaled(gemm, out, a, b)
    if on_gpu:
        is_exact = a.quantizer.is_exact_in_bfloat16 and b.quantizer.is_exact_in_bfloat16
        dtype, wide = np.dtype(jnp.bfloat16 if is_exact else jnp.float32), np.dtype(jnp.float32)
    # GPUs would round operands in float32 to TF32.
    precision = lax.Precision.HIGHEST if dtype == wide else lax.Precision.DEFAULT
    values = Gemm(gemm.lhs, gemm.rhs, dtype, dtype, wide, precision=precision)
    return multiply_wide(DEQUANTIZED, values, a, b).astype(gemm.out_dtype)
