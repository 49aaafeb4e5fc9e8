"""Blackwell's units for scales per block, by ``jax.nn.scaled_matmul`` (cuDNN)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8flax._core.axes import vary_alike
from fp8flax._core.formats import E5M2
from fp8flax._core.gemm.gemm import Gemm, GemmSizes, are_positive, as_matrices, from_matrices
from fp8flax._core.gemm.gpus import NATIVE_MX
from fp8flax._core.qtensor import Dims, QTensor, Quantizer, padded


def supports(lhs: Quantizer, rhs: Quantizer, sizes: GemmSizes, capability: float) -> bool:
    """Returns whether the units of a GPU multiply codes of two quantizers.

    They take NVFP4, and scales that are powers of two, in blocks of equal width, but not e5m2 by e5m2.
    """
    if lhs.block is None or rhs.block is None:
        return False
    is_wide_enough = lhs.block[1] == rhs.block[1] and lhs.block[1] % lhs.unit_columns == 0
    return (
        capability >= NATIVE_MX
        and are_positive(sizes)
        and lhs.is_exact_in_bfloat16
        and rhs.is_exact_in_bfloat16
        and is_wide_enough
        and lhs.unit_columns == rhs.unit_columns
        and {lhs.dtype, rhs.dtype} != {E5M2}
    )


def compute(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies in Blackwell's units: a scale per 32 columns, 16 of NVFP4. Repeats coarser scales."""
    (left, left_scale), (right, right_scale) = _operand(a, gemm.lhs), _operand(b, gemm.rhs)
    dtype = jnp.float32 if gemm.out_dtype == jnp.float64 else gemm.out_dtype
    out = jax.nn.scaled_matmul(left, right, left_scale, right_scale, preferred_element_type=dtype)
    # The result of jax.nn.scaled_matmul lacks the axes of jax.shard_map that the operands vary over.
    return from_matrices(gemm, a, b, vary_alike(out, left, right)[0])


def _operand(x: QTensor, dims: Dims) -> tuple[jax.Array, jax.Array]:
    """Returns codes as matrices of whole blocks, and a scale for each row and each unit of columns."""
    height, (_, width) = x.block[dims.free[-1]] if dims.free else 1, x.quantizer.block
    codes, scale = as_matrices(x.codes, dims), as_matrices(x.scale, dims)
    batch, rows, columns = scale.shape
    scale = jnp.repeat(scale.astype(x.quantizer.scale_dtype), height, axis=1)
    scale = jnp.repeat(scale, width // x.quantizer.unit_columns, axis=2)
    return padded(codes, (batch, rows * height, columns * width)), scale
