"""Multiplies codes with scales per tensor or slice: asks XLA for cublasLt, where cublasLt takes them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8flax._compat.choice_at_lowering import for_cuda, row_major
from fp8flax._core.formats import E5M2, OCP_DTYPES
from fp8flax._core.gemm.gemm import Gemm, GemmSizes, are_positive, scaled
from fp8flax._core.gemm.gpus import NATIVE_FP8, compute_capability, is_hopper, takes_algorithms
from fp8flax._core.names import CUBLASLT
from fp8flax._core.qtensor import Dims, QTensor, Quantizer

_ALGORITHMS = {
    "fast": (lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM, lax.Precision.DEFAULT),
    "exact": (lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32, lax.Precision.HIGHEST),
}
"""By ``Gemm.accumulation``: the algorithm of ``dot_general`` that makes XLA use cublasLt, and the precision
that makes cublasLt accumulate like it, if XLA does not use Triton."""

MULTIPLE = 16
"""cublasLt takes FP8 operands whose sizes are multiples of this. For others XLA would pad by a copy."""

_FEW_ROWS = 256
"""The largest number of rows for which a frozen kernel is not transposed for cublasLt on Hopper.

XLA would transpose the codes at each call, which moves two bytes per code. A GPU kernel that XLA generates
reads the codes once, in the layout that they have. By an estimate from the bandwidth and the speed of both
kernels it is faster below 440 rows; not measured on a GPU."""

_MIN_FOR_PAIRS = 256
"""The smallest M, K and N for which rows are multiplied in pairs. A smaller M, split over many devices,
could leave a device with a single row, for which XLA cannot compile the algorithm."""


_TINY = 100
"""XLA for GPUs multiplies matrices with fewer elements than this in both operands without a GEMM.

It does so in float16, where a product can overflow: 448 times 448 is inf (seen on an H100)."""


def supports(lhs: Quantizer, rhs: Quantizer, sizes: GemmSizes, capability: float) -> bool:
    """Returns whether a GPU, which may be unknown (0), multiplies codes of two quantizers in FP8."""
    _, m, k, n = sizes
    is_tiny = are_positive((m, k, n)) and (m + n) * k < _TINY
    is_fp8 = lhs.block is rhs.block is None and {lhs.dtype, rhs.dtype} <= OCP_DTYPES
    return is_fp8 and not 0 < capability < NATIVE_FP8 and not is_tiny


def _fits_cublaslt(gemm: Gemm, a: QTensor, b: QTensor) -> bool:
    """Returns whether cublasLt takes two operands, and is worth to be asked for."""
    _, m, k, n = gemm.sizes(a, b)
    keeps_layout = gemm.is_stored and gemm.accumulation == "fast" and is_hopper(compute_capability())
    return (
        gemm.accumulation in _ALGORITHMS
        and not any(size % MULTIPLE for size in (m, k, n))
        # cublasLt does not multiply e5m2 by e5m2.
        and not a.codes.dtype == b.codes.dtype == E5M2
        and not (keeps_layout and are_positive((m, k, n)) and m <= _FEW_ROWS)
    )


def compute(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies codes, by cublasLt if it takes them.

    cublasLt applies a single scalar to the result: the product of two scalar scales. This product must lie
    in the range of float32. A product above 2**126 counts as 2**126, which changes only results whose sum
    of products of codes is below 4. If the product is below 2**-126, all results may be zero; the product
    of the two amaxes is then below 3.1e-31 for a gradient (e5m2) and below 2.4e-33 for a forward result.
    More exact results would cost a pass over the result.
    """
    if not _fits_cublaslt(gemm, a, b):  # XLA makes a GPU kernel, and fuses the scales into it
        codes, precision = (row_major(a.codes), row_major(b.codes)), lax.Precision.DEFAULT
        out = lax.dot_general(*codes, gemm.dimension_numbers, precision, preferred_element_type=jnp.float32)
        return scaled(gemm, out, a, b)
    product = partial(_unscaled, gemm, a, b)
    is_bfloat16 = gemm.out_dtype == jnp.bfloat16
    if a.scale.ndim or b.scale.ndim:
        # Scales per row or column need a pass over the result, which cublasLt has rounded to its dtype.
        # (The unscaled sums would overflow float16.)
        return scaled(gemm, product(jnp.bfloat16 if is_bfloat16 else jnp.float32), a, b)
    # The minimum keeps the scalar finite: an infinite scale turns zeros into NaN.
    scale = jnp.minimum(a.scale.astype(jnp.float32) * b.scale.astype(jnp.float32), jnp.float32(2.0**126))
    if not is_bfloat16:
        out = product(jnp.float32) * scale
        return (out if gemm.out_dtype == jnp.float16 else _apart(gemm, out)).astype(gemm.out_dtype)
    # This divides by 1 / scale, because XLA would multiply in bfloat16, with a rounded scale. For the
    # division XLA passes the float32 scale to cublasLt, which multiplies before it rounds. Where XLA cannot
    # do so (a sum in parts, a scale per element of jax.vmap), it divides in float32, since GPUs have no
    # division in bfloat16. (Seen in compiled programs and checked by tests.)
    return _apart(gemm, product(jnp.bfloat16) / (np.float32(1) / scale).astype(jnp.bfloat16))


def _unscaled(gemm: Gemm, a: QTensor, b: QTensor, dtype: DTypeLike) -> jax.Array:
    """Returns the product of the codes by cublasLt.

    Workaround: XLA's partitioner (Shardy) drops the algorithm of a product of two matrices, and XLA would
    then not use cublasLt. So rows are multiplied in pairs. (A transposed operand also avoids this, but is
    gathered once more.)
    """
    algorithm, precision = _ALGORITHMS[gemm.accumulation]
    left, sizes = row_major(a.codes), gemm.sizes(a, b)
    is_plain = (gemm.lhs, gemm.rhs) == (Dims(2, (1,)), Dims(2, (0,))) and are_positive(sizes)
    if is_in_pairs := is_plain and min(sizes[1:]) >= _MIN_FOR_PAIRS:  # M is a multiple of 16
        left, gemm = left.reshape(-1, 2, sizes.k), gemm._replace(lhs=Dims(3, (2,)))
    dot = partial(
        lax.dot_general,
        dimension_numbers=gemm.dimension_numbers,
        precision=algorithm if takes_algorithms() else precision,
        preferred_element_type=dtype,
    )
    with jax.named_scope(CUBLASLT):
        out = for_cuda(dot, left, row_major(b.codes))
    return out.reshape(-1, out.shape[-1]) if is_in_pairs else out


def _apart(gemm: Gemm, out: jax.Array) -> jax.Array:
    """Puts a barrier after a forward GEMM, so that XLA fuses no later operation into the call of cublasLt.

    Workaround: XLA would let cublasLt compute an approximate gelu, too. If another operation also reads the
    result of the GEMM (``gelu(gate) * up`` of one split result, a second output, ``jax.checkpoint``), XLA
    requests both outputs. cublasLt cannot return both in FP8, so the program does not compile. With the
    barrier, a bias is added by the kernel that reads the result.
    """
    return lax.optimization_barrier(out) if gemm.has_barrier else out
