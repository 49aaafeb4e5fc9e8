"""The ways in which NVIDIA GPUs multiply: cublasLt, units for block scales, and GPU kernels of our own.

The table in ``lowering`` says which of these functions runs for which GEMM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from fp8flax._core.axes import vary_alike
from fp8flax._core.gemm.gpus import takes_algorithms
from fp8flax._core.gemm.kernels.block_gemm_hopper import hopper_block_gemm
from fp8flax._core.gemm.request import Gemm, dequantized_gemm, dot, scaled
from fp8flax._core.names import CUBLASLT
from fp8flax._core.qtensor import BLOCK, QTensor

ALGORITHMS = {
    "fast": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM,
    "exact": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32,
}
"""The algorithm of ``dot_general`` that makes XLA use cublasLt, by ``GemmRecipe.accumulation``."""

_PRECISIONS = {"fast": lax.Precision.DEFAULT, "exact": lax.Precision.HIGHEST}
"""The precision that makes cublasLt accumulate like the algorithm, if XLA does not use Triton."""


# One scale per tensor, or per slice along the contraction.


def xla_kernel(gemm: Gemm, lhs: QTensor, rhs: QTensor, *, is_row_major: bool = False) -> jax.Array:
    """Multiplies codes by a GPU kernel that XLA chooses; XLA fuses the product with the scales into it.

    With ``is_row_major`` the codes of both operands are constrained, see ``_row_major``.
    """
    lhs, rhs = map(_row_major, (lhs, rhs)) if is_row_major else (lhs, rhs)
    return scaled(gemm, dot(gemm, lhs.codes, rhs.codes, None, jnp.float32), lhs, rhs)


def cublaslt(gemm: Gemm, lhs: QTensor, rhs: QTensor, *, is_row_major: bool = False) -> jax.Array:
    """Multiplies codes by cublasLt.

    With ``is_row_major`` the codes of both operands are constrained, see ``_row_major``.

    cublasLt applies a single scalar to the result: the product of two scalar scales. This product must lie
    in the range of float32. A product above 2**126 counts as 2**126, which changes only results whose sum
    of products of codes is below 4. If the product is below 2**-126, all results may be zero; the product
    of the two amaxes is then below 3.1e-31 for a gradient (e5m2) and below 2.4e-33 for a forward result.
    More exact results would cost a pass over the result.
    """
    lhs, rhs = map(_row_major, (lhs, rhs)) if is_row_major else (lhs, rhs)
    precision: Any = (ALGORITHMS if takes_algorithms() else _PRECISIONS)[gemm.accumulation]

    def product(sum_dtype: Any) -> jax.Array:
        with jax.named_scope(CUBLASLT):
            return dot(gemm, lhs.codes, rhs.codes, precision, sum_dtype)

    if lhs.scale.ndim or rhs.scale.ndim:
        # Scales per row or column need a pass over the result. cublasLt writes it in float32 for that.
        return scaled(gemm, product(jnp.float32), lhs, rhs)
    # The minimum keeps the scalar finite: an infinite scale turns zeros into NaN.
    scale = jnp.minimum(
        lhs.scale.astype(jnp.float32) * rhs.scale.astype(jnp.float32), jnp.float32(2.0**126)
    )
    if gemm.out_dtype == jnp.float16:  # the unscaled sums would overflow float16
        return (product(jnp.float32) * scale).astype(gemm.out_dtype)
    if gemm.out_dtype != jnp.bfloat16:
        return _apart(gemm, product(jnp.float32) * scale).astype(gemm.out_dtype)
    # This divides by 1 / scale, because XLA would multiply in bfloat16, with a rounded scale. For the
    # division XLA passes the float32 scale to cublasLt, which multiplies before it rounds. Where XLA cannot
    # do so (a sum in parts, a scale per element of jax.vmap), it divides in float32, since GPUs have no
    # division in bfloat16. (Seen in compiled programs and checked by tests.)
    out = product(jnp.bfloat16)
    return _apart(gemm, out / (np.float32(1) / scale).astype(jnp.bfloat16))


def _apart(gemm: Gemm, out: jax.Array) -> jax.Array:
    """Puts a barrier after a forward GEMM, so that XLA fuses no later operation into the call of cublasLt.

    Workaround: XLA would let cublasLt compute an approximate gelu, too. If another operation also reads the
    result of the GEMM (``gelu(gate) * up`` of one split result, a second output, ``jax.checkpoint``), XLA
    requests both outputs. cublasLt cannot return both in FP8, so the program does not compile. With the
    barrier, a bias is added by the kernel that reads the result.
    """
    return lax.optimization_barrier(out) if gemm.has_barrier else out


def _row_major(x: QTensor) -> QTensor:
    """Constrains the codes of an operand to the row-major memory layout.

    cublasLt needs some operands transposed. Without the constraint XLA prefers the transposed layout for
    all arrays that an operand is computed from, back to the float32 kernels that ``nn.scan`` stacks, and
    copies those. With the constraint XLA transposes the FP8 codes. For several devices the constraint is
    not used, because XLA's partitioner would gather the array.
    """
    layout = Layout(major_to_minor=tuple(range(x.codes.ndim)))
    return dataclasses.replace(x, codes=with_layout_constraint(x.codes, layout))


# Scales that change along the contraction.


def dequantized_blocks(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Dequantizes both operands and multiplies them in a wide dtype.

    The dtype is bfloat16 if all scales are powers of two, because it then holds each value exactly, and
    float32 otherwise.
    """
    is_exact = lhs.quantizer.is_exact_in_bfloat16 and rhs.quantizer.is_exact_in_bfloat16
    return dequantized_gemm(gemm, lhs, rhs, jnp.bfloat16 if is_exact else jnp.float32)


def block_scaled_units(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies in Blackwell's units, with a power-of-two scale per 32 columns.

    Scales of larger blocks are repeated.
    """
    multiply = partial(jax.nn.scaled_matmul, preferred_element_type=_at_most_float32(gemm.out_dtype))
    out = _of_stacks(multiply)(*((x.codes, x.quantizer.mx_scale(x)) for x in (lhs, rhs)))
    # The result of jax.nn.scaled_matmul lacks the axes of jax.shard_map that the operands vary over.
    out = vary_alike(out, lhs.codes, rhs.codes)[0]
    return gemm.unpadded(out)


def hopper_blocks(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies by our GPU kernel for Hopper's FP8 units, with float32 scales per 128 columns.

    The kernel applies the scales to the sum over each block of 128 columns. In the right operand 128 rows
    share a scale, or each row has its own.
    """
    is_square = rhs.quantizer.block_scale(rhs, BLOCK) is not None
    multiply: Callable[..., jax.Array] = partial(
        hopper_block_gemm, out_dtype=_at_most_float32(gemm.out_dtype)
    )
    rows = 1, BLOCK if is_square else 1
    operands = [(x.codes, x.quantizer.block_scale(x, n)) for x, n in zip((lhs, rhs), rows)]
    return gemm.unpadded(_of_stacks(multiply)(*operands))


def _at_most_float32(dtype: np.dtype) -> Any:
    """Returns float32 for float64, and any other dtype unchanged."""
    return jnp.float32 if dtype == jnp.float64 else dtype


def _of_stacks(multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Adds a rule for ``jax.vmap`` to a block-scaled product of stacks of matrices.

    The rules of JAX either refuse an operand that is not batched, such as the kernel under ``jax.vmap``
    over examples, or process that operand once per example.

    Args:
        multiply: called as ``(lhs codes, rhs codes, lhs scales, rhs scales)``.

    Returns:
        A function of two pairs, ``(lhs codes, lhs scales)`` and ``(rhs codes, rhs scales)``.
    """

    @jax.custom_batching.custom_vmap
    def matmul(lhs: Any, rhs: Any) -> jax.Array:
        return multiply(lhs[0], rhs[0], lhs[1], rhs[1])

    @matmul.def_vmap
    def _(size: int, is_batched: Any, lhs: Any, rhs: Any) -> tuple[jax.Array, bool]:
        # Codes and scales of an operand come from one tensor, so both are batched or neither is.
        (lhs_batched, _), (rhs_batched, _) = is_batched
        assert all(codes == scale for codes, scale in is_batched)
        if lhs_batched and rhs_batched:
            # The batch becomes more matrices of the stack.
            lhs, rhs = ([x.reshape(-1, *x.shape[2:]) for x in side] for side in (lhs, rhs))
            out = _of_stacks(multiply)(lhs, rhs)
            return out.reshape(size, -1, *out.shape[1:]), True
        # The batch becomes more rows in each matrix of the batched operand.
        lhs, rhs = (
            [jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in side] if batched else side
            for side, batched in ((lhs, lhs_batched), (rhs, rhs_batched))
        )
        out = _of_stacks(multiply)(lhs, rhs)
        axis = 1 if lhs_batched else 2
        shape = (*out.shape[:axis], size, out.shape[axis] // size, *out.shape[axis + 1 :])
        return jnp.moveaxis(out.reshape(shape), axis, 0), True

    return matmul
