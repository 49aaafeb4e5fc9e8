"""Multiplies two operands, quantized or wide: the file that decides how a GEMM runs.

On NVIDIA GPUs a product of FP8 codes runs, in this order of preference, by

* cublasLt, or a GPU kernel that XLA makes, if the scales do not change along the contraction;
* the units of Blackwell, or our GPU kernel for Hopper, if they do;
* a GEMM of the dequantized values, if scales change along the contraction and the GPU has none of these.

On all other devices the same values are multiplied in float32 (in float64 for a float64 result). ``ragged``
decides how the products with the kernels of experts run.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from fp8flax._compat.choice_at_lowering import for_cuda, row_major, unless_partitioned
from fp8flax._core.axes import vary_alike
from fp8flax._core.formats import E5M2
from fp8flax._core.gemm.gpus import (
    NATIVE_FP8,
    NATIVE_MX,
    are_positive,
    compute_capability,
    fits_kernels,
    has_units,
    is_hopper,
    takes_algorithms,
)
from fp8flax._core.gemm.on_shards import on_shards
from fp8flax._core.gemm.tiled_gemm_hopper import Block, tiled_gemm
from fp8flax._core.names import BLOCK_GEMM_HOPPER, CUBLASLT, DEQUANTIZED, KEPT_WIDE
from fp8flax._core.qtensor import BLOCK, TILE, Dims, QTensor, dequantized, padded, round_up
from fp8flax._core.quantize import no_derivative
from fp8flax._core.scaling import apply_scales

_ALGORITHMS = {
    "fast": (lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM, lax.Precision.DEFAULT),
    "exact": (lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32, lax.Precision.HIGHEST),
}
"""By ``GemmRecipe.accumulation``: the algorithm of ``dot_general`` that makes XLA use cublasLt, and the
precision that makes cublasLt accumulate like it, if XLA does not use Triton."""

AnyTensor = QTensor | jax.Array
"""An operand, quantized or wide."""


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
    accumulation: str = "exact"
    """``GemmRecipe.accumulation``, for operands with scales per tensor or slice."""
    precision: Any = None
    """The ``precision`` of ``lax.dot_general``, if the GEMM does not run in FP8."""
    has_barrier: bool = False
    """Whether XLA must fuse no later operation into a call of cublasLt; see ``_apart``."""
    is_stored: bool = False
    """Whether the right operand is a frozen kernel, which is stored in the order of its dimensions."""

    def sizes(self, a: Any, b: Any) -> tuple[int, int, int]:
        """Returns M, K and N of one matrix product of the batch."""
        return (
            math.prod(a.shape[i] for i in self.lhs.free),
            math.prod(a.shape[i] for i in self.lhs.contract),
            math.prod(b.shape[i] for i in self.rhs.free),
        )


def multiply(gemm: Gemm, a: AnyTensor, b: AnyTensor) -> jax.Array:
    """Returns ``lax.dot_general`` of the values of two operands, in ``gemm.out_dtype``."""
    if not (isinstance(a, QTensor) and isinstance(b, QTensor)):
        return multiply_wide(KEPT_WIDE, gemm, a, b)
    if bool(a.block) != bool(b.block):
        return multiply_wide(DEQUANTIZED, gemm, a, b)
    if a.block:
        return no_derivative(partial(_blocks, gemm))(a, b)
    # Opaque to the policies of jax.checkpoint: a policy that saves the results of dots would otherwise find
    # the dots of each platform, and keep all of them.
    on_gpu, emulated = partial(_of_codes(gemm, a, b), gemm), partial(_emulated, gemm)
    return no_derivative(partial(lax.platform_dependent, cuda=on_gpu, default=emulated))(a, b)


# Wide operands, and the reference for FP8.


def sum_dtype_of(*dtypes: Any) -> np.dtype:
    """Returns the dtype of sums of products: float64 if one of the dtypes is float64, otherwise float32."""
    return np.dtype(np.float64 if np.float64 in dtypes else np.float32)


def multiply_wide(scope: str, gemm: Gemm, a: AnyTensor, b: AnyTensor) -> jax.Array:
    """Multiplies in the dtypes that the operands had before they were quantized; dequantizes if needed.

    By ``scope`` the audit says why.
    """
    dot = partial(_dot, gemm, precision=gemm.precision)  # None takes jax.default_matmul_precision
    with jax.named_scope(scope):
        if gemm.is_stored and isinstance(b, QTensor) and not isinstance(a, QTensor) and not b.block:
            # The scales multiply the result, so XLA reads the FP8 codes in its GEMM. If the codes were
            # multiplied by the scales first, XLA would write the wide kernel to memory.
            wide = sum_dtype_of(a.dtype, gemm.out_dtype)
            out = dot(a, b.codes.astype(a.dtype), wide)
            scale = _as_result(b, gemm.rhs, out.ndim, is_left=False)
            return (out * scale.astype(wide)).astype(gemm.out_dtype)
        return dot(dequantized(a, gemm.lhs_dtype), dequantized(b, gemm.rhs_dtype), gemm.out_dtype)


def _emulated(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies codes in float32, which holds their products exactly, and then by the scales."""
    wide = sum_dtype_of(gemm.out_dtype)
    return _scaled(gemm, _dot(gemm, a.codes.astype(wide), b.codes.astype(wide), wide), a, b)


def _dequantized(gemm: Gemm, dtype: Any, a: QTensor, b: QTensor) -> jax.Array:
    """Dequantizes both operands to a wide dtype and multiplies them."""
    sum_dtype = sum_dtype_of(dtype)
    # GPUs would round operands in float32 to TF32.
    precision = lax.Precision.HIGHEST if dtype == sum_dtype else lax.Precision.DEFAULT
    wide = Gemm(gemm.lhs, gemm.rhs, dtype, dtype, sum_dtype, precision=precision)
    return multiply_wide(DEQUANTIZED, wide, a, b).astype(gemm.out_dtype)


def _dot(
    gemm: Gemm, a: jax.Array, b: jax.Array, dtype: Any, precision: Any = lax.Precision.DEFAULT
) -> jax.Array:
    """Returns ``lax.dot_general`` of two arrays, in ``dtype``."""
    batch = tuple(range(gemm.lhs.num_batch))
    dims = (gemm.lhs.contract, gemm.rhs.contract), (batch, batch)
    return lax.dot_general(a, b, dims, precision, preferred_element_type=dtype)


def _scaled(gemm: Gemm, out: jax.Array, a: QTensor, b: QTensor) -> jax.Array:
    """Returns ``out`` times the scales of both operands that multiply the result, in ``out_dtype``.

    With scales per block, ``out`` is the product of codes and these scales.
    """
    a_scale = _as_result(a, gemm.lhs, out.ndim, is_left=True)
    b_scale = _as_result(b, gemm.rhs, out.ndim, is_left=False)
    # XLA would multiply constant scales (of a closed-over model) with each other, and could overflow.
    a_scale, b_scale = (x if x.ndim else lax.optimization_barrier(x) for x in (a_scale, b_scale))
    if out.dtype == jnp.float64:  # float64 holds the product of any two float32 scales
        out = out * a_scale.astype(out.dtype) * b_scale.astype(out.dtype)
    else:
        out = apply_scales(out.astype(jnp.float32), a_scale, b_scale)
    return out.astype(gemm.out_dtype)


def _as_result(x: QTensor, dims: Dims, ndim: int, *, is_left: bool) -> jax.Array:
    """Returns the scales of an operand in the dimensions of the result: batch, free left, free right."""
    scale = x.tensor_scale if x.block else x.scale
    scale = jnp.ones((), jnp.float32) if scale is None else scale.astype(jnp.float32)
    if not scale.ndim:
        return scale
    num_free = len(dims.free)
    scale = lax.transpose(scale, dims.in_order)
    scale = lax.squeeze(scale, range(dims.num_batch + num_free, x.ndim))
    start = dims.num_batch if is_left else ndim - num_free
    places = (*range(dims.num_batch), *range(start, start + num_free))
    return lax.expand_dims(scale, [i for i in range(ndim) if i not in places])


# One scale per tensor, or per slice along the contraction.

_TINY = 100
"""XLA for GPUs multiplies matrices with fewer elements than this in both operands without a GEMM.

It does so in float16, where a product can overflow: 448 times 448 is inf (seen on an H100)."""

CUBLASLT_MULTIPLE = 16
"""cublasLt takes FP8 operands whose sizes are multiples of this. For others XLA would pad by a copy."""

_FEW_ROWS = 256
"""The largest number of rows for which a frozen kernel is not transposed for cublasLt on Hopper.

XLA would transpose the codes at each call, which moves two bytes per code. A GPU kernel that XLA generates
reads the codes once, in the layout that they have. By an estimate from the bandwidth and the speed of both
kernels it is faster below 440 rows; not measured on a GPU."""


def _of_codes(gemm: Gemm, a: QTensor, b: QTensor) -> Callable[..., jax.Array]:
    """Returns the function by which an NVIDIA GPU multiplies operands with scales per tensor or slice."""
    capability = compute_capability()  # 0: the GPU is unknown
    sizes = rows, depth, columns = gemm.sizes(a, b)
    is_tiny = are_positive(sizes) and (rows + columns) * depth < _TINY
    is_fp8 = has_units(a.quantizer, b.quantizer, capability) and not 0 < capability < NATIVE_FP8
    if not is_fp8 or is_tiny:
        return _emulated
    keeps_layout = gemm.is_stored and gemm.accumulation == "fast" and is_hopper(capability)
    fits_cublaslt = (
        gemm.accumulation in _ALGORITHMS
        and not any(size % CUBLASLT_MULTIPLE for size in sizes)
        # cublasLt does not multiply e5m2 by e5m2.
        and not a.codes.dtype == b.codes.dtype == E5M2
        and not (keeps_layout and are_positive(sizes) and rows <= _FEW_ROWS)
    )
    return _cublaslt if fits_cublaslt else _xla_kernel


def _xla_kernel(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies codes by a GPU kernel that XLA chooses; XLA fuses the product with the scales into it."""
    return _scaled(gemm, _dot(gemm, row_major(a.codes), row_major(b.codes), jnp.float32), a, b)


def _cublaslt(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies codes by cublasLt.

    cublasLt applies a single scalar to the result: the product of two scalar scales. This product must lie
    in the range of float32. A product above 2**126 counts as 2**126, which changes only results whose sum
    of products of codes is below 4. If the product is below 2**-126, all results may be zero; the product
    of the two amaxes is then below 3.1e-31 for a gradient (e5m2) and below 2.4e-33 for a forward result.
    More exact results would cost a pass over the result.
    """
    product = partial(_unscaled, gemm, a, b)
    is_bfloat16 = gemm.out_dtype == jnp.bfloat16
    if a.scale.ndim or b.scale.ndim:
        # Scales per row or column need a pass over the result, which cublasLt has rounded to its dtype.
        # (The unscaled sums would overflow float16.)
        return _scaled(gemm, product(jnp.bfloat16 if is_bfloat16 else jnp.float32), a, b)
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


_MIN_FOR_PAIRS = 256
"""The smallest M, K and N for which rows are multiplied in pairs. A smaller M, split over many devices,
could leave a device with a single row, for which XLA cannot compile the algorithm."""


def _unscaled(gemm: Gemm, a: QTensor, b: QTensor, dtype: Any) -> jax.Array:
    """Returns the product of the codes by cublasLt.

    Workaround: XLA's partitioner (Shardy) drops the algorithm of a product of two matrices, and XLA would
    then not use cublasLt. So rows are multiplied in pairs. (A transposed operand also avoids this, but is
    gathered once more.)
    """
    algorithm, precision = _ALGORITHMS[gemm.accumulation]
    left, sizes = row_major(a.codes), gemm.sizes(a, b)
    is_plain = (gemm.lhs, gemm.rhs) == (Dims(2, (1,)), Dims(2, (0,))) and are_positive(sizes)
    if is_in_pairs := is_plain and min(sizes) >= _MIN_FOR_PAIRS:  # M is a multiple of 16
        left, gemm = left.reshape(-1, 2, sizes[1]), gemm._replace(lhs=Dims(3, (2,)))
    dot = partial(_dot, gemm, dtype=dtype, precision=algorithm if takes_algorithms() else precision)
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


# Scales that change along the contraction.


def _blocks(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies operands with scales per block.

    Under ``jax.vmap`` the batch becomes a free dimension if only the left operand has it. Otherwise it
    becomes a batch dimension of both operands. So GPU kernels and ``on_shards`` never meet ``jax.vmap``.
    """
    product = custom_vmap(partial(_blocks_of, gemm))

    @product.def_vmap
    def _(size: int, is_batched: Any, a: QTensor, b: QTensor) -> tuple[jax.Array, bool]:
        # In a free dimension, each row must have scales of its own.
        is_free = not any(jax.tree.leaves(is_batched[1])) and a.quantizer.block[0] == 1
        place, batched = gemm.lhs.num_batch if is_free else 0, gemm._replace(lhs=gemm.lhs.batched(is_free))
        a = _with_batch(size, is_batched[0], a, place)
        if not is_free:
            batched, b = batched._replace(rhs=gemm.rhs.batched()), _with_batch(size, is_batched[1], b, 0)
        return jnp.moveaxis(_blocks(batched, a, b), place, 0), True

    return product(a, b)


def _with_batch(size: int, is_batched: QTensor, x: QTensor, place: int) -> QTensor:
    """Returns an operand in which a batch of ``jax.vmap`` is the dimension ``place``."""
    # If only a key of stochastic rounding is batched, the scale of the tensor is not.
    x = jax.tree.map(lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)), x, is_batched)
    codes, scale = (jnp.moveaxis(array, 0, place) for array in (x.codes, x.scale))
    of_tensor = x.tensor_scale
    if of_tensor is not None:
        if of_tensor.ndim == 1:  # one scalar for each tensor of the batch
            of_tensor = lax.expand_dims(of_tensor, range(1, codes.ndim))
        of_tensor = jnp.moveaxis(of_tensor, 0, place)
    return QTensor(codes, scale, x.quantizer, (*x.block[:place], 1, *x.block[place:]), of_tensor)


def _blocks_of(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies operands with scales per block, in the way of the device that the program is for."""
    if a.tensor_scale is not None or b.tensor_scale is not None:
        # The scales of tensors multiply the result. So bfloat16 holds the operands exactly, and parts of an
        # operand on several devices have scales per block alone.
        keeps_dtype = gemm.out_dtype == jnp.bfloat16 and compute_capability()
        sum_dtype = gemm.out_dtype if keeps_dtype else sum_dtype_of(gemm.out_dtype)
        of_blocks = (dataclasses.replace(x, tensor_scale=None) for x in (a, b))
        return _scaled(gemm, _blocks_of(gemm._replace(out_dtype=sum_dtype), *of_blocks), a, b)
    reference = partial(_dequantized, gemm, sum_dtype_of(gemm.out_dtype))
    if not compute_capability():
        return lax.platform_dependent(a, b, cuda=partial(_in_bfloat16, gemm), default=reference)

    def of_part(a: QTensor, b: QTensor) -> jax.Array:
        return _on_one_gpu(gemm, a, b)(gemm, a, b)

    scope = {_hopper: BLOCK_GEMM_HOPPER, _blackwell: ""}.get(_on_one_gpu(gemm, a, b), DEQUANTIZED)
    of_parts = on_shards(of_part, *_letters(gemm, a, b), scope)
    on_gpu = partial(unless_partitioned, of_part, of_parts, partial(_in_bfloat16, gemm))
    return lax.platform_dependent(a, b, cuda=on_gpu, default=reference)


def _letters(gemm: Gemm, a: QTensor, b: QTensor) -> tuple[tuple[str, str], str]:
    """Returns a letter for each dimension of the operands and of the result, see ``on_shards``."""
    letters = iter(string.ascii_lowercase)
    of_a = [next(letters) for _ in a.shape]
    batch = range(gemm.lhs.num_batch)
    partners = dict(zip((*batch, *gemm.rhs.contract), (*batch, *gemm.lhs.contract), strict=True))
    of_b = [of_a[partners[i]] if i in partners else next(letters) for i in range(b.ndim)]
    out = [*(of_a[i] for i in (*batch, *gemm.lhs.free)), *(of_b[i] for i in gemm.rhs.free)]
    return ("".join(of_a), "".join(of_b)), "".join(out)


def _on_one_gpu(gemm: Gemm, a: QTensor, b: QTensor) -> Callable[..., jax.Array]:
    """Returns the function by which one NVIDIA GPU multiplies operands with scales per block."""
    capability, sizes = compute_capability(), gemm.sizes(a, b)
    batch = a.shape[: gemm.lhs.num_batch]
    if not (are_positive((*batch, *sizes)) and has_units(a.quantizer, b.quantizer, capability)):
        return _in_bfloat16
    if capability >= NATIVE_MX:
        return _blackwell
    rows, depth, columns = map(round_up, sizes)
    shapes = (*batch, rows, depth), (*batch, columns, depth), (*batch, rows, columns)
    return _hopper if fits_kernels(*shapes) else _in_bfloat16


def _in_bfloat16(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies the dequantized values, in bfloat16 if it holds them exactly, otherwise in float32."""
    is_exact = a.quantizer.is_exact_in_bfloat16 and b.quantizer.is_exact_in_bfloat16
    return _dequantized(gemm, jnp.bfloat16 if is_exact else jnp.float32, a, b)


def _blackwell(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies in Blackwell's units: a scale per 32 columns, 16 of NVFP4. Repeats coarser scales."""

    def operand(x: QTensor, dims: Dims) -> tuple[jax.Array, jax.Array]:
        codes, scale, height = _as_matrices(x, dims)
        scale = jnp.repeat(scale.astype(x.quantizer.scale_dtype), height, axis=1)
        return codes, jnp.repeat(scale, x.quantizer.block[1] // x.quantizer.unit_columns, axis=2)

    (left, left_scale), (right, right_scale) = operand(a, gemm.lhs), operand(b, gemm.rhs)
    dtype = jnp.float32 if gemm.out_dtype == jnp.float64 else gemm.out_dtype
    out = jax.nn.scaled_matmul(left, right, left_scale, right_scale, preferred_element_type=dtype)
    # The result of jax.nn.scaled_matmul lacks the axes of jax.shard_map that the operands vary over.
    return _from_matrices(gemm, a, b, vary_alike(out, left, right)[0])


def _hopper(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies by our GPU kernel for Hopper's FP8 units, with float32 scales per 128 columns.

    In the right operand 128 rows share a scale, or each row has its own.
    """

    def operand(x: QTensor, dims: Dims, *, is_right: bool) -> tuple[jax.Array, jax.Array]:
        """Returns the matrices, one below the other, and the scales of the rows in each block."""
        codes, scale, height = _as_matrices(x, dims)
        batch, rows, depth = codes.shape
        unit = BLOCK if is_right and height % BLOCK == 0 else 1  # the rows that share a scale
        scale = jnp.repeat(scale, height // unit, axis=1)
        codes = padded(codes, (batch, round_up(rows), depth))
        scale = padded(scale, (batch, round_up(rows) // unit, depth // BLOCK))
        # The blocks come first, because the kernel fetches the scales of the rows of a block.
        return codes.reshape(-1, depth), jnp.moveaxis(scale, 2, 0).reshape(depth // BLOCK, -1)

    left, left_scale = operand(a, gemm.lhs, is_right=False)
    right, right_scale = operand(b, gemm.rhs, is_right=True)
    num_matrices = math.prod(a.shape[: gemm.lhs.num_batch])
    rows, columns = (x.shape[0] // num_matrices for x in (left, right))

    def block(t: Any, b: Any) -> Block:
        matrix = lax.div(t, np.int32(rows // TILE))
        return Block(lhs=t, rhs=matrix * np.int32(columns // TILE), depth=b, scale=t)

    out = tiled_gemm(
        left,
        right,
        left_scale,
        right_scale,
        num_blocks=lambda t: left.shape[1] // BLOCK,
        block=block,
        shape=(num_matrices * rows, columns),
        out_dtype=jnp.float32 if gemm.out_dtype == jnp.float64 else gemm.out_dtype,
        name=BLOCK_GEMM_HOPPER,
    )
    return _from_matrices(gemm, a, b, out.reshape(num_matrices, rows, columns))


def _as_matrices(x: QTensor, dims: Dims) -> tuple[jax.Array, jax.Array, int]:
    """Returns the codes as matrices ``(batch, rows, columns)``, their scales, and the rows of a block.

    The columns are the contracted dimensions. Zeros fill up partial blocks.
    """
    height = x.block[dims.free[-1]] if dims.free else 1
    split = dims.num_batch, dims.num_batch + len(dims.free)

    def flat(array: jax.Array) -> jax.Array:
        array = lax.transpose(array, dims.in_order)
        parts = array.shape[: split[0]], array.shape[split[0] : split[1]], array.shape[split[1] :]
        return array.reshape([math.prod(part) for part in parts])

    codes, scale = flat(x.codes), flat(x.scale)
    filled = codes.shape[0], scale.shape[1] * height, scale.shape[2] * x.quantizer.block[1]
    return padded(codes, filled), scale, height


def _from_matrices(gemm: Gemm, a: QTensor, b: QTensor, out: jax.Array) -> jax.Array:
    """Returns the result of a GEMM, from the product ``(batch, rows, columns)`` of padded matrices."""
    rows, _, columns = gemm.sizes(a, b)
    free = (*(a.shape[i] for i in gemm.lhs.free), *(b.shape[i] for i in gemm.rhs.free))
    shape = *a.shape[: gemm.lhs.num_batch], *free
    return out[:, :rows, :columns].reshape(shape).astype(gemm.out_dtype)
