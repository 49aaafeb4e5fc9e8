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
from fp8flax._core.gemm.kernels.block_gemm import BLOCK, block_gemm
from fp8flax._core.gemm.kernels.block_gemm_hopper import hopper_block_gemm
from fp8flax._core.gemm.kernels.on_shards import gemm_on_shards
from fp8flax._core.gemm.kernels.transpose import transpose
from fp8flax._core.gemm.reference import dequantized_gemm, dot, scaled
from fp8flax._core.gemm.request import Gemm
from fp8flax._core.names import BLOCK_GEMM, BLOCK_GEMM_F16, BLOCK_GEMM_HOPPER
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantizers import MX_COLUMNS

Multiply = Callable[[Gemm, QTensor, QTensor], jax.Array]

ALGORITHMS = {
    "fast": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM,
    "exact": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32,
}
"""What asks XLA for cublasLt, by the word for the accumulation."""


# One scale per tensor, or per slice along the contraction.


def xla_kernel(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies codes by a GPU kernel that XLA chooses, which takes in the scales."""
    return scaled(gemm, dot(gemm, lhs.codes, rhs.codes, None, jnp.float32), lhs, rhs)


def cublaslt(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies codes by cublasLt.

    cublasLt takes in the product of two scalar scales. The product must be in the range of float32, too.
    Above 2**126 it counts as 2**126, which changes only results whose codes sum to less than 4. Below
    2**-126, where the amaxes' product is below 3e-31 for a gradient (e5m2) and 2e-33 for a result, all
    results may be zeros. To be more exact would cost a pass over the result.
    """
    product = partial(dot, gemm, lhs.codes, rhs.codes, ALGORITHMS[gemm.recipe.accumulation])
    if lhs.scale.ndim or rhs.scale.ndim:
        # One scale per row or column is a pass over cublasLt's result, which is not rounded before it.
        return scaled(gemm, product(jnp.float32), lhs, rhs)
    # One scalar, which is all that cublasLt takes in. An infinite one would turn zeros into NaN.
    scale = jnp.minimum(
        lhs.scale.astype(jnp.float32) * rhs.scale.astype(jnp.float32), jnp.float32(2.0**126)
    )
    if gemm.out_dtype == jnp.float16:  # which the unscaled sums would overflow
        return (product(jnp.float32) * scale).astype(gemm.out_dtype)
    if gemm.out_dtype != jnp.bfloat16:
        return _apart(gemm, product(jnp.float32) * scale).astype(gemm.out_dtype)
    # As written the divisor would be rounded to bfloat16. But XLA hands the scale itself to cublasLt, in
    # float32, which multiplies before it rounds; and where it does not (a sum in parts, a scale per element
    # of jax.vmap), it divides in float32, as GPUs have no division in bfloat16. They do multiply in it: a
    # product would be that by a rounded scale. (Seen in compiled programs; tests hold it.)
    out = product(jnp.bfloat16)
    return _apart(gemm, out / (np.float32(1) / scale).astype(jnp.bfloat16))


def _apart(gemm: Gemm, out: jax.Array) -> jax.Array:
    """Keeps what follows a forward GEMM out of cublasLt.

    XLA would have cublasLt compute an approximate gelu, too. If anything else reads the result of the GEMM
    (``gelu(gate) * up`` of one split result, a second output, ``jax.checkpoint``), XLA asks for both, which
    cublasLt cannot give in FP8, and does not compile. A bias is then added where the result is read.
    """
    return lax.optimization_barrier(out) if gemm.name == "forward" else out


def row_major(multiply: Multiply) -> Multiply:
    """Returns ``multiply`` with the codes of both operands held to the layout that they have in memory.

    cublasLt wants some operands transposed. Left alone, XLA prefers that layout for all that an operand is
    made from, back to the float32 kernels that ``nn.scan`` stacks, of which it then makes a transposed
    copy. With the layout held, XLA transposes FP8. On several devices XLA's partitioner would gather an
    array for this, so there XLA is left alone.
    """

    def held(gemm: Gemm, *operands: QTensor) -> jax.Array:
        lhs, rhs = (dataclasses.replace(x, codes=_held(x.codes)) for x in operands)
        return multiply(gemm, lhs, rhs)

    return held


def _held(codes: jax.Array) -> jax.Array:
    return with_layout_constraint(codes, Layout(major_to_minor=tuple(range(codes.ndim))))


def cublaslt_in_columns(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies codes by cublasLt, after our GPU kernel transposed those that do not lie along the sum."""
    found = gemm.of_columns()
    assert found is not None
    matrices, are_transposed = found
    depth = gemm.sizes[1]

    def in_columns(x: QTensor, is_transposed: bool) -> QTensor:
        codes = transpose(x.codes.reshape(depth, -1)) if is_transposed else x.codes.reshape(-1, depth)
        scale = x.scale.reshape(-1, 1) if x.scale.ndim else x.scale
        return dataclasses.replace(x, codes=_held(codes), scale=scale)

    out = cublaslt(matrices, *map(in_columns, (lhs, rhs), are_transposed))
    return out.reshape(gemm.out_shape)


# Scales that change along the contraction.


def dequantized_blocks(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies the values: in bfloat16 if scales are powers of two, which is exact; else in float32."""
    is_exact = lhs.quantizer.is_exact_in_bfloat16 and rhs.quantizer.is_exact_in_bfloat16
    return dequantized_gemm(gemm, lhs, rhs, jnp.bfloat16 if is_exact else jnp.float32)


def block_scaled_units(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies in Blackwell's units, with a power-of-two scale per 32 columns.

    Scales of larger blocks are repeated. Blocks of two widths are padded differently, so the narrower
    operand is filled up with zero bytes; a scale of zero bytes is 2**-127.
    """
    operands = [x.quantizer.as_mx(x) for x in (lhs, rhs)]
    width = max(x.codes.shape[2] for x in operands)
    multiply = partial(jax.nn.scaled_matmul, preferred_element_type=_at_most_float32(gemm.out_dtype))
    out = _of_stacks(multiply)(
        *((_widen(x.codes, width), _widen(x.scale, width // MX_COLUMNS)) for x in operands)
    )
    out = vary_alike(out, lhs.codes, rhs.codes)[0]  # of which JAX's own loses track
    return _unpadded(gemm, out)


def hopper_blocks(gemm: Gemm, lhs: QTensor, rhs: QTensor, *, on_shards: bool = False) -> jax.Array:
    """Multiplies by our kernel for Hopper's FP8 units, with float32 scales per 128 columns."""
    is_square = rhs.quantizer.as_blocks(rhs, BLOCK, BLOCK) is not None
    return _by_kernel(gemm, lhs, rhs, hopper_block_gemm, BLOCK_GEMM_HOPPER, is_square, on_shards)


hopper_blocks_on_shards = partial(hopper_blocks, on_shards=True)


def triton_blocks(
    gemm: Gemm, lhs: QTensor, rhs: QTensor, *, in_float16: bool = False, on_shards: bool = False
) -> jax.Array:
    """Multiplies by our Triton kernel, with float32 scales per 128 columns: in FP8 units, or in float16."""
    name = BLOCK_GEMM_F16 if in_float16 else BLOCK_GEMM
    return _by_kernel(gemm, lhs, rhs, partial(block_gemm, in_float16=in_float16), name, False, on_shards)


triton_blocks_on_shards = partial(triton_blocks, on_shards=True)


def _by_kernel(
    gemm: Gemm,
    lhs: QTensor,
    rhs: QTensor,
    kernel: Callable[..., jax.Array],
    name: str,
    is_square: bool,
    on_shards: bool,
) -> jax.Array:
    """Multiplies by a kernel that applies the scales to the sum of each block.

    Args:
        gemm: what is multiplied.
        lhs: its left operand.
        rhs: its right operand.
        kernel: as ``block_gemm``.
        name: the scope of the kernel, by which an audit knows it.
        is_square: whether the kernel gets one scale for 128 rows of the right operand.
        on_shards: whether each of several devices computes a part.
    """
    multiply: Callable[..., jax.Array] = partial(kernel, out_dtype=_at_most_float32(gemm.out_dtype))
    if on_shards:
        multiply = gemm_on_shards(multiply, name=name, is_square=is_square)
    rows = 1, BLOCK if is_square else 1
    blocks = [x.quantizer.as_blocks(x, n, BLOCK) for x, n in zip((lhs, rhs), rows)]
    return _unpadded(gemm, _of_stacks(multiply)(*((x.codes, x.scale) for x in blocks)))


def _unpadded(gemm: Gemm, out: jax.Array) -> jax.Array:
    """Returns a product of whole blocks, ``(batch, rows, columns)``, as the result of the GEMM."""
    _, rows, _ = gemm.lhs.matrix_shape
    _, columns, _ = gemm.rhs.matrix_shape
    return out[:, :rows, :columns].reshape(gemm.out_shape).astype(gemm.out_dtype)


def _at_most_float32(dtype: np.dtype) -> Any:
    return jnp.float32 if dtype == jnp.float64 else dtype


def _of_stacks(multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns ``multiply(*codes, *scales)`` of two pairs of codes and scales, with a rule for ``jax.vmap``.

    JAX's own refuses an operand that is not batched, such as the kernel under ``vmap`` over examples, or
    computes it again and again.
    """

    @jax.custom_batching.custom_vmap
    def matmul(lhs: Any, rhs: Any) -> jax.Array:
        return multiply(lhs[0], rhs[0], lhs[1], rhs[1])

    @matmul.def_vmap
    def _(size: int, is_batched: Any, lhs: Any, rhs: Any) -> tuple[jax.Array, bool]:
        # Codes and scales come from one tensor.
        (lhs_batched, _), (rhs_batched, _) = is_batched
        assert all(codes == scale for codes, scale in is_batched)
        if lhs_batched and rhs_batched:
            # More matrices.
            lhs, rhs = ([x.reshape(-1, *x.shape[2:]) for x in side] for side in (lhs, rhs))
            out = _of_stacks(multiply)(lhs, rhs)
            return out.reshape(size, -1, *out.shape[1:]), True
        # More rows of the matrices that are batched.
        lhs, rhs = (
            [jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in side] if batched else side
            for side, batched in ((lhs, lhs_batched), (rhs, rhs_batched))
        )
        out = _of_stacks(multiply)(lhs, rhs)
        axis = 1 if lhs_batched else 2
        shape = (*out.shape[:axis], size, out.shape[axis] // size, *out.shape[axis + 1 :])
        return jnp.moveaxis(out.reshape(shape), axis, 0), True

    return matmul


def _widen(x: jax.Array, width: int) -> jax.Array:
    """Pads the columns with zero bytes (for a scale that is 2**-127)."""
    codes = lax.bitcast_convert_type(x, jnp.uint8)
    padded = lax.pad(codes, np.uint8(0), ((0, 0, 0), (0, 0, 0), (0, width - x.shape[2], 0)))
    return lax.bitcast_convert_type(padded, x.dtype)
