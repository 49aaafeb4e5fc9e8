"""One GEMM of quantized operands, lowered for the device that it is compiled for."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from fp8flax._core.device import (
    NATIVE_FP8,
    NATIVE_MX,
    Fp8EmulationWarning,
    compile_target,
    compute_capability,
)
from fp8flax._core.names import DEQUANTIZED, KEPT_WIDE, QDQ
from fp8flax._kernels.block_gemm import BLOCK, block_gemm
from fp8flax._operands import (
    MX_COLUMNS,
    Quantized,
    View,
    apply_scales,
    dequantize_operand,
    is_blockwise,
    mx_operand,
)
from fp8flax._recipes import BlockQuantizer, GemmRecipe
from fp8flax._transforms import unless_partitioned, vary_alike

# cublasLt takes FP8 operands in multiples of this; XLA would pad, and copy, for it.
_CUBLASLT_MULTIPLE = 16
_E5M2 = np.dtype(jnp.float8_e5m2)
_OCP_DTYPES = (np.dtype(jnp.float8_e4m3fn), _E5M2)
ONCE = (
    "The direct form of an FP8 matmul can be differentiated once, in reverse mode. For second derivatives "
    "give the layer an op with delayed scaling in another form, partial(fp8flax.Fp8DotGeneralOp, "
    "form='qdq'). A model of fp8flax.quantize_model has no other form: compute what is differentiated "
    "twice under fp8flax.autocast(enabled=False), or leave those layers out by exclude."
)


def warn_if_emulated(*recipes: GemmRecipe) -> None:
    """Warns, once, where the device at hand cannot multiply what one of the recipes makes."""
    if compile_target.value is not None:
        return
    # Each from one place, so that Python's default filter shows it once.
    capability = compute_capability()
    if capability < NATIVE_FP8:
        warnings.warn(
            f"FP8 matmuls are emulated on {jax.devices()[0].device_kind}: the values are those of FP8, the "
            "speed is not. fp8flax.audit shows what a GPU would run.",
            Fp8EmulationWarning,
            stacklevel=1,
        )
    elif capability < NATIVE_MX and any(is_blockwise(r.lhs) and is_blockwise(r.rhs) for r in recipes):
        warnings.warn(
            f"{jax.devices()[0].device_kind} has no units for block scales: the FP8 values are multiplied "
            "in a wider dtype, at its speed. fp8flax.audit shows which. Float8CurrentScaling runs in FP8.",
            Fp8EmulationWarning,
            stacklevel=1,
        )


class Gemm(NamedTuple):
    """What a GEMM must know statically (hashable)."""

    recipe: GemmRecipe
    dimension_numbers: Any
    lhs: View
    rhs: View
    lhs_dtype: np.dtype
    """Of the wide operand that was quantized."""
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    precision: Any = None
    """For a GEMM that does not run in FP8."""
    out_sharding: Any = None
    """Of the result, on a mesh with explicit axes, where JAX may not be able to tell."""
    dequantized: bool = False
    """Whether to multiply in the operands' wide dtypes on every device, as a reference."""
    is_read_by_model: bool = False
    """Whether the result goes to whatever the model computes next: that of a forward GEMM."""


Operand = Quantized | jax.Array


def multiply(gemm: Gemm, lhs: Any, rhs: Any) -> jax.Array:
    """Returns ``dot_general`` of the dequantized operands, in ``gemm.out_dtype``.

    Scales that do not change along the contraction multiply the result of FP8 operands; others are applied
    inside it.
    """
    quantizers = (gemm.recipe.lhs, gemm.recipe.rhs)
    if None in quantizers or gemm.dequantized or is_blockwise(quantizers[0]) != is_blockwise(quantizers[1]):
        return _wide_gemm(gemm, lhs, rhs)
    dtypes = [q.dtype for q in quantizers if q is not None]
    too_old = (
        compile_target.value is None
        and jax.default_backend() == "gpu"
        and compute_capability() < NATIVE_FP8
        and not is_blockwise(quantizers[0])
    )
    gemm_on = _platform_gemm if set(dtypes) <= set(_OCP_DTYPES) and not too_old else _emulated_gemm
    return gemm_on(gemm, lhs, rhs)


# A custom_jvp for one effect: it is opaque to the policies of jax.checkpoint. One that saves the results
# of dots would otherwise find those of both branches, and keep each of them.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _platform_gemm(gemm: Gemm, lhs: Quantized, rhs: Quantized) -> jax.Array:
    on_cuda = _cuda_block_gemm if is_blockwise(gemm.recipe.lhs) else _cuda_gemm
    return lax.platform_dependent(
        lhs, rhs, cuda=partial(on_cuda, gemm), default=partial(_emulated_gemm, gemm)
    )


@_platform_gemm.defjvp
def _platform_gemm_jvp(gemm: Gemm, primals: Any, tangents: Any) -> Any:
    del gemm, primals, tangents
    raise TypeError(ONCE)


def _dot(gemm: Gemm, lhs: jax.Array, rhs: jax.Array, precision: Any, sum_dtype: Any) -> jax.Array:
    return lax.dot_general(
        lhs,
        rhs,
        gemm.dimension_numbers,
        # Not None, which would be the ambient jax.default_matmul_precision.
        lax.Precision.DEFAULT if precision is None else precision,
        preferred_element_type=sum_dtype,
        out_sharding=gemm.out_sharding,
    )


def _wide_gemm(gemm: Gemm, lhs: Operand, rhs: Operand) -> jax.Array:
    """Multiplies in the dtypes that the operands had before they were quantized."""
    wide = [
        dequantize_operand(quantizer, operand, view, dtype)
        for quantizer, operand, view, dtype in (
            (gemm.recipe.lhs, lhs, gemm.lhs, gemm.lhs_dtype),
            (gemm.recipe.rhs, rhs, gemm.rhs, gemm.rhs_dtype),
        )
    ]
    kept = gemm.recipe.lhs is None or gemm.recipe.rhs is None
    scope = KEPT_WIDE if kept else QDQ if gemm.dequantized else DEQUANTIZED
    with jax.named_scope(scope):
        return lax.dot_general(
            *wide,
            gemm.dimension_numbers,
            gemm.precision,
            preferred_element_type=gemm.out_dtype,
            out_sharding=gemm.out_sharding,
        )


def _emulated_gemm(gemm: Gemm, lhs: Quantized, rhs: Quantized) -> jax.Array:
    """Multiplies FP8 values in float32, which holds them and their products exactly."""
    wide = jnp.dtype(jnp.float64 if gemm.out_dtype == jnp.float64 else jnp.float32)
    if is_blockwise(gemm.recipe.lhs):
        return _dequantized_dot(gemm, lhs, rhs, wide)
    out = _dot(gemm, lhs.codes.astype(wide), rhs.codes.astype(wide), None, wide)
    return _scaled(gemm, out, lhs, rhs)


def _dequantized_dot(gemm: Gemm, lhs: Quantized, rhs: Quantized, dtype: Any) -> jax.Array:
    operands = (
        dequantize_operand(gemm.recipe.lhs, lhs, gemm.lhs, dtype),
        dequantize_operand(gemm.recipe.rhs, rhs, gemm.rhs, dtype),
    )
    sum_dtype = jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    precision = lax.Precision.HIGHEST if dtype == sum_dtype else None
    with jax.named_scope(DEQUANTIZED):
        return _dot(gemm, *operands, precision, sum_dtype).astype(gemm.out_dtype)


def _scaled(gemm: Gemm, out: jax.Array, lhs: Quantized, rhs: Quantized) -> jax.Array:
    """Returns a product of codes times the scales of both operands, in the dtype of the result."""
    lhs_scale, rhs_scale = lhs.scale, rhs.scale
    batch = gemm.lhs.sizes(gemm.lhs.batch)
    rows, columns = gemm.lhs.sizes(gemm.lhs.free), gemm.rhs.sizes(gemm.rhs.free)
    if lhs_scale.ndim:
        lhs_scale = lax.transpose(lhs_scale, gemm.lhs.order)
        lhs_scale = lhs_scale.reshape(*batch, *rows, *(1 for _ in columns))
    else:  # XLA would multiply two scalars that are constants, as in a model that is closed over
        lhs_scale = lax.optimization_barrier(lhs_scale)
    if rhs_scale.ndim:
        rhs_scale = lax.transpose(rhs_scale, gemm.rhs.order)
        rhs_scale = rhs_scale.reshape(*batch, *(1 for _ in rows), *columns)
    if out.dtype == jnp.float64:  # which holds the product of any two scales
        out = out * lhs_scale.astype(out.dtype) * rhs_scale.astype(out.dtype)
    else:
        out = apply_scales(out, lhs_scale, rhs_scale)
    return out.astype(gemm.out_dtype)


def _cuda_gemm(gemm: Gemm, lhs: Quantized, rhs: Quantized) -> jax.Array:
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
    if any(size % _CUBLASLT_MULTIPLE for size in _sizes(gemm)) or (
        lhs.codes.dtype == rhs.codes.dtype == _E5M2
    ):
        preset = None
    q_lhs, q_rhs = _row_major(lhs.codes), _row_major(rhs.codes)
    if preset is None or lhs.scale.ndim or rhs.scale.ndim:
        # A kernel of XLA's own takes the scales in. One per row or column is a pass over cublasLt's result,
        # which is not rounded before it.
        return _scaled(gemm, _dot(gemm, q_lhs, q_rhs, preset, jnp.float32), lhs, rhs)
    # One scalar, which is all that cublasLt takes in. An infinite one would turn zeros into NaN.
    scale = jnp.minimum(lhs.scale * rhs.scale, jnp.float32(2.0**126))
    if gemm.out_dtype == jnp.float16:  # which the unscaled sums would overflow
        return (_dot(gemm, q_lhs, q_rhs, preset, jnp.float32) * scale).astype(gemm.out_dtype)
    if gemm.out_dtype != jnp.bfloat16:
        out = _apart(gemm, _dot(gemm, q_lhs, q_rhs, preset, jnp.float32) * scale)
        return out.astype(gemm.out_dtype)
    # As written the divisor would be rounded to bfloat16. But XLA hands the scale itself to cublasLt, in
    # float32, which multiplies before it rounds; and where it does not (a sum in parts, a scale per element
    # of jax.vmap), it divides in float32, as GPUs have no division in bfloat16. They do multiply in it: a
    # product would be that by a rounded scale. (Seen in compiled programs; tests hold it.)
    out = _dot(gemm, q_lhs, q_rhs, preset, jnp.bfloat16)
    return _apart(gemm, out / (np.float32(1) / scale).astype(jnp.bfloat16))


def _apart(gemm: Gemm, out: jax.Array) -> jax.Array:
    """Keeps what follows a GEMM out of cublasLt.

    XLA would have it compute an approximate gelu, too; and where anything else reads what the gelu does
    (``gelu(gate) * up`` of one split result, a second output, ``jax.checkpoint``), it asks for both, which
    cublasLt cannot give in FP8, and does not compile. A bias is then added where it is read.
    """
    return lax.optimization_barrier(out) if gemm.is_read_by_model else out


def _cuda_block_gemm(gemm: Gemm, lhs: Quantized, rhs: Quantized) -> jax.Array:
    """Multiplies block-scaled operands, by what the GPU has for them, to the same values.

    * Blackwell multiplies with a power-of-two scale per 32 columns; larger blocks are expanded to that.
    * With float32 scales per 128 columns, and on Hopper with all scales per 128, a kernel of our own reads
      FP8 and applies the scales to the sum of each block.
    * What is left is dequantized: to bfloat16, which holds products of a code and a power of two exactly,
      or to float32.
    """
    lhs_quantizer, rhs_quantizer = gemm.recipe.lhs, gemm.recipe.rhs
    assert isinstance(lhs_quantizer, BlockQuantizer)
    assert isinstance(rhs_quantizer, BlockQuantizer)
    widths = (lhs_quantizer.block[1], rhs_quantizer.block[1])
    exact_in_bfloat16 = "float32" not in (lhs_quantizer.scale, rhs_quantizer.scale)
    capability = compute_capability()
    is_mx = exact_in_bfloat16 and all(width % MX_COLUMNS == 0 for width in widths)
    if 0 in _sizes(gemm):
        return _dequantized_dot(gemm, lhs, rhs, jnp.float32)
    if is_mx and capability >= NATIVE_MX:
        out = _mx_gemm(gemm, mx_operand(lhs_quantizer, lhs), mx_operand(rhs_quantizer, rhs))
        out = vary_alike(out, lhs.codes, rhs.codes)[0]  # of which JAX's own loses track
        return _unpadded(gemm, out)
    dequantized = partial(_dequantized_dot, gemm, dtype=jnp.bfloat16 if exact_in_bfloat16 else jnp.float32)
    if widths == (BLOCK, BLOCK) and _fits_kernel(lhs, rhs):
        return unless_partitioned(partial(_kernel_gemm, gemm, capability), dequantized, lhs, rhs)
    return dequantized(lhs, rhs)


def _kernel_gemm(gemm: Gemm, capability: float, lhs: Quantized, rhs: Quantized) -> jax.Array:
    lhs_quantizer, rhs_quantizer = gemm.recipe.lhs, gemm.recipe.rhs
    assert isinstance(lhs_quantizer, BlockQuantizer)
    assert isinstance(rhs_quantizer, BlockQuantizer)
    out = block_gemm(
        lhs.codes,
        rhs.codes,
        jnp.repeat(lhs.scale, lhs_quantizer.block[0], axis=1),
        jnp.repeat(rhs.scale, rhs_quantizer.block[0], axis=1),
        out_dtype=_at_most_float32(gemm.out_dtype),
        in_float16=capability < NATIVE_MX or lhs.codes.dtype != rhs.codes.dtype,
    )
    return _unpadded(gemm, out)


def _unpadded(gemm: Gemm, out: jax.Array) -> jax.Array:
    """Returns a product of whole blocks, ``(batch, rows, columns)``, as the result of the GEMM."""
    _, rows, _ = gemm.lhs.matrix_shape
    _, columns, _ = gemm.rhs.matrix_shape
    shape = (
        *gemm.lhs.sizes(gemm.lhs.batch),
        *gemm.lhs.sizes(gemm.lhs.free),
        *gemm.rhs.sizes(gemm.rhs.free),
    )
    return out[:, :rows, :columns].reshape(shape).astype(gemm.out_dtype)


def _fits_kernel(lhs: Quantized, rhs: Quantized) -> bool:
    """Tells whether our own kernel multiplies these.

    Triton counts elements in 32 bits. JAX 0.11 calls its Triton backend for Pallas deprecated: it may be
    gone one day. (Nor would it be partitioned over several devices, see ``unless_partitioned``.)
    """
    return (
        compute_capability() >= NATIVE_FP8
        and importlib.util.find_spec("jax.experimental.pallas.triton") is not None
        and lhs.scale.dtype == rhs.scale.dtype == jnp.float32
        # Nor those of which jax.export does not know the size.
        and all(isinstance(x.codes.size, int) and x.codes.size < 2**31 for x in (lhs, rhs))
    )


def _at_most_float32(dtype: np.dtype) -> Any:
    return jnp.float32 if dtype == jnp.float64 else dtype


def _mx_gemm(gemm: Gemm, lhs: Quantized, rhs: Quantized) -> jax.Array:
    (lhs_codes, lhs_scale), (rhs_codes, rhs_scale) = lhs, rhs
    width = max(lhs_codes.shape[2], rhs_codes.shape[2])  # blocks of two widths are padded differently
    return _scaled_matmul(_at_most_float32(gemm.out_dtype))(
        (_widen(lhs_codes, width), _widen(lhs_scale, width // MX_COLUMNS)),
        (_widen(rhs_codes, width), _widen(rhs_scale, width // MX_COLUMNS)),
    )


def _scaled_matmul(out_dtype: Any) -> Callable[..., jax.Array]:
    """Returns ``jax.nn.scaled_matmul`` of pairs of codes and scales, with a rule for ``jax.vmap``.

    JAX's own refuses an operand that is not batched, such as the kernel under ``vmap`` over examples.
    """

    @jax.custom_batching.custom_vmap
    def matmul(lhs: Any, rhs: Any) -> jax.Array:
        return jax.nn.scaled_matmul(lhs[0], rhs[0], lhs[1], rhs[1], preferred_element_type=out_dtype)

    @matmul.def_vmap
    def _(size: int, is_batched: Any, lhs: Any, rhs: Any) -> tuple[jax.Array, bool]:
        # Codes and scales come from one tensor.
        (lhs_batched, _), (rhs_batched, _) = is_batched
        assert all(codes == scale for codes, scale in is_batched)
        if lhs_batched and rhs_batched:
            # More matrices.
            lhs, rhs = ([x.reshape(-1, *x.shape[2:]) for x in side] for side in (lhs, rhs))
            out = _scaled_matmul(out_dtype)(lhs, rhs)
            return out.reshape(size, -1, *out.shape[1:]), True
        # More rows of the matrices that are batched.
        lhs, rhs = (
            [jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in side] if batched else side
            for side, batched in ((lhs, lhs_batched), (rhs, rhs_batched))
        )
        out = _scaled_matmul(out_dtype)(lhs, rhs)
        axis = 1 if lhs_batched else 2
        shape = (*out.shape[:axis], size, out.shape[axis] // size, *out.shape[axis + 1 :])
        return jnp.moveaxis(out.reshape(shape), axis, 0), True

    return matmul


def _widen(x: jax.Array, width: int) -> jax.Array:
    """Pads the columns with zero bytes (for a scale that is 2**-127)."""
    codes = lax.bitcast_convert_type(x, jnp.uint8)
    padded = lax.pad(codes, np.uint8(0), ((0, 0, 0), (0, 0, 0), (0, width - x.shape[2], 0)))
    return lax.bitcast_convert_type(padded, x.dtype)


def _sizes(gemm: Gemm) -> tuple[int, int, int]:
    """Returns M, K and N of one product."""
    return (
        math.prod(gemm.lhs.sizes(gemm.lhs.free)),
        math.prod(gemm.lhs.sizes(gemm.lhs.contract)),
        math.prod(gemm.rhs.sizes(gemm.rhs.free)),
    )


def _row_major(q: jax.Array) -> jax.Array:
    """Holds an FP8 operand to the layout that it has in memory anyway.

    cublasLt wants some operands transposed. Left alone, XLA prefers that layout for all that an operand is
    made from, back to the float32 kernels that ``nn.scan`` stacks, of which it then makes a transposed
    copy. Held here, it transposes FP8. The partitioner for many devices would gather an array for this, so
    there XLA is left alone.
    """
    layout = Layout(major_to_minor=tuple(range(q.ndim)))
    return unless_partitioned(lambda q: with_layout_constraint(q, layout), lambda q: q, q)
