"""What NVIDIA GPUs make of a GEMM: cublasLt, hardware for block scales, or a kernel of our own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType

from fp8flax._core.gemm.gpus import NATIVE_FP8, NATIVE_MX, compute_capability, has_triton
from fp8flax._core.gemm.kernels.block_gemm import BLOCK, block_gemm
from fp8flax._core.gemm.kernels.block_gemm_hopper import HOPPER, hopper_block_gemm, multiplies_dtypes
from fp8flax._core.gemm.kernels.on_shards import gemm_on_shards
from fp8flax._core.gemm.kernels.transpose import can_transpose, transpose
from fp8flax._core.gemm.reference import dequantized_gemm, dot, scaled
from fp8flax._core.gemm.request import Gemm
from fp8flax._core.jax_rules import unless_partitioned, vary_alike
from fp8flax._core.names import BLOCK_GEMM, BLOCK_GEMM_F16, BLOCK_GEMM_HOPPER
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantizers import MX_COLUMNS
from fp8flax._core.recipes import GemmRecipe

# cublasLt takes FP8 operands in multiples of this; XLA would pad, and copy, for it.
_CUBLASLT_MULTIPLE = 16
_E5M2 = np.dtype(jnp.float8_e5m2)


def cuda_gemm(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies FP8 operands in FP8 units: by cublasLt, or as XLA chooses where that does not fit.

    cublasLt takes in the product of two scalar scales, so that must be in the range of float32, too. Above
    2**126 it counts as that, which changes no result but those whose codes sum to less than 4; below
    2**-126, where the amaxes' product is below 3e-31 for a gradient (e5m2) and 2e-33 for a result, all may
    be zeros. More would cost a pass over the result.
    """
    preset = {
        "fast": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM,
        "exact": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32,
    }.get(gemm.recipe.accumulation)
    if any(size % _CUBLASLT_MULTIPLE for size in gemm.sizes) or (
        lhs.codes.dtype == rhs.codes.dtype == _E5M2
    ):
        preset = None
    if gemm.recipe.accumulation == "fast" and _transposes_for_few_rows(gemm):
        preset = None
    product = partial(_product, gemm, preset, lhs.codes, rhs.codes)
    if preset is None or lhs.scale.ndim or rhs.scale.ndim:
        # A kernel of XLA's own takes the scales in. One per row or column is a pass over cublasLt's result,
        # which is not rounded before it.
        return scaled(gemm, product(jnp.float32), lhs, rhs)
    # One scalar, which is all that cublasLt takes in. An infinite one would turn zeros into NaN.
    scale = jnp.minimum(
        lhs.scale.astype(jnp.float32) * rhs.scale.astype(jnp.float32), jnp.float32(2.0**126)
    )
    if gemm.out_dtype == jnp.float16:  # which the unscaled sums would overflow
        return (product(jnp.float32) * scale).astype(gemm.out_dtype)
    if gemm.out_dtype != jnp.bfloat16:
        out = _apart(gemm, product(jnp.float32) * scale)
        return out.astype(gemm.out_dtype)
    # As written the divisor would be rounded to bfloat16. But XLA hands the scale itself to cublasLt, in
    # float32, which multiplies before it rounds; and where it does not (a sum in parts, a scale per element
    # of jax.vmap), it divides in float32, as GPUs have no division in bfloat16. They do multiply in it: a
    # product would be that by a rounded scale. (Seen in compiled programs; tests hold it.)
    out = product(jnp.bfloat16)
    return _apart(gemm, out / (np.float32(1) / scale).astype(jnp.bfloat16))


_FEW_ROWS = 256


def _transposes_for_few_rows(gemm: Gemm) -> bool:
    """Tells whether cublasLt on Hopper would have a frozen kernel transposed at each call, for few rows.

    That moves two bytes for each code of the kernel; a kernel of XLA's own reads it once, as it lies. At
    720 and 1400 TFLOP/s and 3.4 TB/s the FP8 units make up for it from 440 rows on.
    """
    found, rows = gemm.of_columns(), gemm.sizes[0]
    return (
        gemm.is_packed
        and HOPPER <= compute_capability() < NATIVE_MX
        and isinstance(rows, int)
        and rows <= _FEW_ROWS
        and found is not None
        and found[1][1]
    )


def _product(gemm: Gemm, preset: Any, lhs: jax.Array, rhs: jax.Array, sum_dtype: Any) -> jax.Array:
    """Returns the product of codes."""

    def as_it_is(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return dot(gemm, _row_major(lhs), _row_major(rhs), preset, sum_dtype)

    found = gemm.of_columns()
    if preset is None or found is None or not _has_transpose(gemm, lhs, rhs):
        return as_it_is(lhs, rhs)
    matrices, are_transposed = found
    depth = gemm.sizes[1]

    def in_columns(codes: jax.Array, is_transposed: bool) -> jax.Array:
        return _held(transpose(codes.reshape(depth, -1)) if is_transposed else codes.reshape(-1, depth))

    def of_columns(*operands: jax.Array) -> jax.Array:
        lhs, rhs = map(in_columns, operands, are_transposed)
        return dot(matrices, lhs, rhs, preset, sum_dtype).reshape(gemm.out_shape)

    return unless_partitioned(of_columns, as_it_is, lhs, rhs)


def _has_transpose(gemm: Gemm, lhs: jax.Array, rhs: jax.Array) -> bool:
    """Tells whether our kernel transposes what cublasLt on Hopper would have XLA transpose.

    That is for wgrad alone: the codes of a kernel XLA writes in both orders where it casts.
    """
    rows, depth, columns = gemm.sizes
    return (
        gemm.name == "wgrad"
        and HOPPER <= compute_capability() < NATIVE_MX
        and all(can_transpose(depth, size) for size in (rows, columns))
        and all(AxisType.Explicit not in jax.typeof(x).sharding.mesh.axis_types for x in (lhs, rhs))
    )


def _apart(gemm: Gemm, out: jax.Array) -> jax.Array:
    """Keeps what follows a GEMM out of cublasLt.

    XLA would have it compute an approximate gelu, too; and where anything else reads what the gelu does
    (``gelu(gate) * up`` of one split result, a second output, ``jax.checkpoint``), it asks for both, which
    cublasLt cannot give in FP8, and does not compile. A bias is then added where it is read.
    """
    return lax.optimization_barrier(out) if gemm.name == "forward" else out


def cuda_block_gemm(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Multiplies operands whose scales change along the contraction, by what the GPU has for them.

    * Blackwell multiplies with a power-of-two scale per 32 columns; larger blocks are expanded to that.
    * With float32 scales per 128 columns a kernel of our own reads FP8 and applies the scales to the sum of
      each block. On Hopper that multiplies in FP8 units if both operands are of one dtype, else in float16.
    * What is left is dequantized: to bfloat16, which holds products of a code and a power of two exactly,
      or to float32.
    """
    exact = lhs.quantizer.is_exact_in_bfloat16 and rhs.quantizer.is_exact_in_bfloat16
    if 0 in (*gemm.sizes, *gemm.out_shape):
        return dequantized_gemm(gemm, lhs, rhs, jnp.float32)
    if compute_capability() >= NATIVE_MX:
        mx_lhs, mx_rhs = lhs.quantizer.as_mx(lhs), rhs.quantizer.as_mx(rhs)
        if mx_lhs is not None and mx_rhs is not None:
            out = _mx_gemm(gemm, mx_lhs, mx_rhs)
            out = vary_alike(out, lhs.codes, rhs.codes)[0]  # of which JAX's own loses track
            return _unpadded(gemm, out)
    dequantized = partial(dequantized_gemm, gemm, dtype=jnp.bfloat16 if exact else jnp.float32)
    if not _fits_kernel(gemm, lhs, rhs):
        return dequantized(lhs, rhs)
    return _kernel_gemm(gemm, compute_capability(), lhs, rhs, dequantized)


def has_units(recipe: GemmRecipe, capability: float) -> bool:
    """Tells whether a GPU of this compute capability multiplies operands of a GEMM as FP8.

    Both have scales that change along the contraction. On Hopper those are a kernel's of our own.
    """
    return capability >= NATIVE_MX or _is_for_hopper(recipe, capability)


def _is_for_hopper(recipe: GemmRecipe, capability: float) -> bool:
    """Tells whether the kernel for Hopper's FP8 units multiplies these operands."""
    lhs, rhs = recipe.lhs, recipe.rhs
    assert lhs is not None
    assert rhs is not None
    is_of_blocks = lhs.scale_columns == rhs.scale_columns == BLOCK
    return HOPPER <= capability < NATIVE_MX and is_of_blocks and multiplies_dtypes(lhs.dtype, rhs.dtype)


def _kernel_gemm(
    gemm: Gemm, capability: float, lhs: QTensor, rhs: QTensor, dequantized: Callable[..., jax.Array]
) -> jax.Array:
    """Multiplies by a kernel: on the one device, or on each of several. If it cannot, dequantized."""
    out_dtype, rhs_rows = _at_most_float32(gemm.out_dtype), 1
    if _is_for_hopper(gemm.recipe, capability):
        name, multiply = BLOCK_GEMM_HOPPER, partial(hopper_block_gemm, out_dtype=out_dtype)
        if rhs.quantizer.as_blocks(rhs, BLOCK, BLOCK) is not None:
            rhs_rows = BLOCK
    else:
        in_float16 = capability < NATIVE_MX or lhs.codes.dtype != rhs.codes.dtype
        name = BLOCK_GEMM_F16 if in_float16 else BLOCK_GEMM
        multiply = partial(block_gemm, out_dtype=out_dtype, in_float16=in_float16)
    on_shards = gemm_on_shards(multiply, name=name, is_square=rhs_rows > 1)

    def of_blocks(multiply: Callable[..., jax.Array], lhs: QTensor, rhs: QTensor) -> jax.Array:
        blocks = [x.quantizer.as_blocks(x, rows, BLOCK) for x, rows in ((lhs, 1), (rhs, rhs_rows))]
        return _unpadded(gemm, _of_stacks(multiply)(*((x.codes, x.scale) for x in blocks)))

    return unless_partitioned(
        partial(of_blocks, multiply), dequantized, lhs, rhs, on_shards=partial(of_blocks, on_shards)
    )


def _unpadded(gemm: Gemm, out: jax.Array) -> jax.Array:
    """Returns a product of whole blocks, ``(batch, rows, columns)``, as the result of the GEMM."""
    _, rows, _ = gemm.lhs.matrix_shape
    _, columns, _ = gemm.rhs.matrix_shape
    return out[:, :rows, :columns].reshape(gemm.out_shape).astype(gemm.out_dtype)


def _fits_kernel(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> bool:
    """Tells whether our own kernel multiplies these.

    Triton counts elements in 32 bits. JAX 0.11 calls its Triton backend for Pallas deprecated: it may be
    gone one day.
    """
    sizes = lhs.codes.size, rhs.codes.size, math.prod(gemm.out_shape)
    return (
        compute_capability() >= NATIVE_FP8
        and (has_triton() or _is_for_hopper(gemm.recipe, compute_capability()))
        and all(x.quantizer.as_blocks(x, 1, BLOCK) is not None for x in (lhs, rhs))
        # Nor those of which jax.export does not know the size.
        and all(isinstance(size, int) and size < 2**31 for size in sizes)
    )


def _at_most_float32(dtype: np.dtype) -> Any:
    return jnp.float32 if dtype == jnp.float64 else dtype


def _mx_gemm(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    # Blocks of two widths are padded differently.
    width = max(lhs.codes.shape[2], rhs.codes.shape[2])
    out_dtype = _at_most_float32(gemm.out_dtype)
    return _of_stacks(partial(jax.nn.scaled_matmul, preferred_element_type=out_dtype))(
        *((_widen(x.codes, width), _widen(x.scale, width // MX_COLUMNS)) for x in (lhs, rhs))
    )


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


def _row_major(q: jax.Array) -> jax.Array:
    """Holds an FP8 operand to the layout that it has in memory anyway.

    cublasLt wants some operands transposed. Left alone, XLA prefers that layout for all that an operand is
    made from, back to the float32 kernels that ``nn.scan`` stacks, of which it then makes a transposed
    copy. Held here, it transposes FP8. The partitioner for many devices would gather an array for this, so
    there XLA is left alone.
    """
    return unless_partitioned(_held, lambda q: q, q)


def _held(q: jax.Array) -> jax.Array:
    return with_layout_constraint(q, Layout(major_to_minor=tuple(range(q.ndim))))
