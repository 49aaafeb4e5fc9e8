"""Chooses how a GEMM or a cast runs: by the first row of a table that fits the GPU, or by the reference.

This is the only file that makes this choice, for one device and for several.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from fp8flax._compat.choice_at_lowering import unless_partitioned
from fp8flax._core.gemm import cuda, cuda_casts, cuda_ragged
from fp8flax._core.gemm.gpus import (
    NATIVE_FP8,
    NATIVE_MX,
    compute_capability,
    has_triton,
    is_hopper,
)
from fp8flax._core.gemm.kernels.groups import num_tiles
from fp8flax._core.gemm.kernels.on_shards import gemm_on_shards
from fp8flax._core.gemm.kernels.tiled_gemm_hopper import multiplies_dtypes
from fp8flax._core.gemm.request import (
    CastPair,
    ExpertProducts,
    ExpertSums,
    Gemm,
    can_multiply_codes,
)
from fp8flax._core.gemm.units import is_for_hopper
from fp8flax._core.names import BLOCK_GEMM_HOPPER, CUBLASLT, DEQUANTIZED
from fp8flax._core.no_derivative import no_derivative
from fp8flax._core.qtensor import BLOCK, TILE, QTensor


class Row(NamedTuple):
    """One way in which NVIDIA GPUs run a kind of request."""

    fits: Callable[..., bool]
    """Called with a compute capability, a request and its operands. Returns whether a GPU of this
    capability can run the request in this way. The capability is 0 if no NVIDIA GPU is known at tracing."""
    one: Callable[..., Any]
    """Runs the request in a program for one device, or inside of ``jax.shard_map``. Called with the request
    and its operands."""
    several: Callable[..., Any] | None = None
    """Runs the request in a program that XLA splits over several devices. None if this way of running does
    not support several devices."""
    on_shards: Callable[..., Any] | None = None
    """Replaces ``several`` in a program that XLA splits over a mesh. The function uses
    ``custom_partitioning``. Where JAX does not support that (without a mesh, on explicit axes, under
    ``jax.vmap``, by ``jax.export``), the first row that has ``several`` runs; or the reference, if there is
    none."""


def lowered(request: Any, *operands: Any) -> Any:
    """Returns ``request.reference(*operands)``, computed in the way that suits the device best.

    A program for one NVIDIA GPU uses the first row of the table that fits the request. A program that XLA
    splits over several GPUs uses the first fitting row that has ``on_shards`` or ``several``. If no row
    fits, and on all other devices, the reference runs.

    Args:
        request: a hashable description of the computation with a ``reference``, such as a ``Gemm``.
        *operands: trees of arrays.
    """
    rows = rows_of(request, *operands)
    reference = request.reference
    if not rows:
        return reference(*operands)
    one = partial(rows[0].one, request)
    split = [row for row in rows if row.several is not None or row.on_shards is not None]
    on_shards = split[0].on_shards if split else None
    if on_shards is not None:
        on_shards = (
            partial(on_shards, request) if _may_have_custom_partitioning(request, *operands) else None
        )
    several = next((partial(row.several, request) for row in split if row.several is not None), reference)

    on_cuda = one
    # If the row runs the same function on one device and on several, XLA itself can split it.
    if on_shards is not None or rows[0].one is not rows[0].several:
        on_cuda = partial(unless_partitioned, one, several, on_shards=on_shards)
    # Opaque to the policies of jax.checkpoint: a policy that saves the results of dots would otherwise find
    # the dots of each platform, and keep all of them.
    run = no_derivative(partial(lax.platform_dependent, cuda=on_cuda, default=reference))
    return run(*operands)


def _may_have_custom_partitioning(request: Any, *operands: Any) -> bool:
    """Returns whether a program may contain ``custom_partitioning``.

    JAX then requires a single mesh in the whole program, even if the program is for CPUs. So a GEMM with
    one scale per tensor does not get it: XLA alone sends as few bytes. On explicit axes JAX derives the
    sharding of the result from the operations of the reference.
    """
    if any(map(_is_explicit, jax.tree.leaves(operands))):
        return False
    return not (isinstance(request, Gemm) and all(x.quantizer.has_one_scale for x in operands))


def _on_shards(gemm: Gemm, lhs: QTensor, rhs: QTensor, *, name: str = "") -> jax.Array:
    """Multiplies on a mesh: each device multiplies its parts by the first row that fits them.

    Args:
        gemm: what is multiplied.
        lhs: the left operand.
        rhs: the right operand.
        name: the scope by which an audit recognizes how the parts are multiplied; empty if the compiled
            program shows it.
    """

    def multiply(part: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
        return rows_of(part, lhs, rhs)[0].one(part, lhs, rhs)

    return gemm_on_shards(multiply, gemm, lhs, rhs, name=name)


def _reference(request: Any, *operands: Any) -> Any:
    """Runs the reference implementation of a request, as a row of the table."""
    return request.reference(*operands)


def rows_of(request: Any, *operands: Any) -> list[Row]:
    """Returns the rows of the table that fit a request on the GPU that the program is compiled for."""
    capability = compute_capability()
    return [row for row in _TABLE[type(request)] if row.fits(capability, request, *operands)]


# Predicates.


_E5M2 = np.dtype(jnp.float8_e5m2)
_OCP_DTYPES = {np.dtype(jnp.float8_e4m3fn), _E5M2}
# Triton counts elements in 32 bits, so our GPU kernels support only fewer elements than this.
_MAX_ELEMENTS = 2**31


def _padded_size(shape: tuple[int, ...]) -> int:
    """Returns the number of elements of an array whose last two dimensions are padded to whole blocks."""
    return math.prod(shape[:-2]) * math.prod(-(-size // BLOCK) * BLOCK for size in shape[-2:])


def _is_in_fp8(lhs: Any, rhs: Any) -> bool:
    """Returns whether the codes of both operands are of dtypes that NVIDIA GPUs multiply."""
    return can_multiply_codes(lhs, rhs) and {lhs.codes.dtype, rhs.codes.dtype} <= _OCP_DTYPES


def _multiplies_codes(capability: float, gemm: Gemm, lhs: Any, rhs: Any) -> bool:
    """Returns whether FP8 units can multiply the codes, so that only the result is multiplied by scales."""
    return (
        _is_in_fp8(lhs, rhs)
        and not lhs.quantizer.scales_along_contraction
        and not 0 < capability < NATIVE_FP8  # 0: the GPU is unknown
        and not _is_tiny(gemm)
    )


_TINY = 100
"""XLA for GPUs multiplies matrices with fewer elements than this in both operands without a GEMM."""


def _is_tiny(gemm: Gemm) -> bool:
    """Returns whether XLA multiplies the codes one by one, in float16, where a product can overflow.

    448 times 448 is above the largest float16, so the result is inf (seen on an H100).
    """
    sizes = rows, depth, columns = gemm.sizes
    # Under jax.export a size may be symbolic.
    return all(isinstance(size, int) for size in sizes) and (rows + columns) * depth < _TINY


# cublasLt takes FP8 operands whose sizes are multiples of this. For other sizes XLA would pad by a copy.
_CUBLASLT_MULTIPLE = 16


def _fits_cublaslt(capability: float, gemm: Gemm, lhs: Any, rhs: Any) -> bool:
    """Returns whether cublasLt can multiply the codes, and the accumulation of the recipe asks for it."""
    return (
        _multiplies_codes(capability, gemm, lhs, rhs)
        and gemm.accumulation in cuda.ALGORITHMS
        and not any(size % _CUBLASLT_MULTIPLE for size in gemm.sizes)
        # cublasLt does not multiply e5m2 by e5m2.
        and not lhs.codes.dtype == rhs.codes.dtype == _E5M2
        and not _is_decoding(capability, gemm)
    )


# The largest power of two below the 440 rows that ``_is_decoding`` estimates. Not measured on a GPU.
_FEW_ROWS = 256


def _is_decoding(capability: float, gemm: Gemm) -> bool:
    """Returns whether a GEMM multiplies few rows by a frozen kernel that must be transposed for cublasLt.

    On Hopper XLA would transpose the codes at each call, which moves two bytes per code. A GPU kernel
    that XLA generates reads the codes once, in the layout that they have. With 720 TFLOP/s for that kernel,
    1400 TFLOP/s for the FP8 units, and 3.4 TB/s, cublasLt with the copy is faster from 440 rows on.
    """
    rows, kernel = gemm.sizes[0], gemm.rhs
    is_depth_first = not kernel.batch and kernel.contract == tuple(range(len(kernel.contract)))
    return (
        gemm.accumulation == "fast"
        and gemm.is_packed
        and is_hopper(capability)
        and isinstance(rows, int)
        and rows <= _FEW_ROWS
        and is_depth_first
    )


def _is_explicit(x: Any) -> bool:
    """Returns whether an array lies on a mesh with explicit axes."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def _is_per_block(capability: float, gemm: Gemm, lhs: Any, rhs: Any) -> bool:
    """Returns whether both operands have scales that change along the contraction."""
    del capability, gemm
    return _is_in_fp8(lhs, rhs) and lhs.quantizer.scales_along_contraction


def _are_matrices_alike(capability: float, gemm: Gemm, lhs: Any, rhs: Any) -> bool:
    """Returns whether the codes of both operands are matrices of the same width, with scales per block.

    Blocks of different widths may fill up the matrices to different widths.
    """
    return _is_per_block(capability, gemm, lhs, rhs) and lhs.codes.shape[2] == rhs.codes.shape[2]


def _has_block_scaled_units(capability: float, gemm: Gemm, lhs: Any, rhs: Any) -> bool:
    """Returns whether Blackwell's units can multiply the operands, with an E8M0 scale per 32 columns."""
    return (
        _are_matrices_alike(capability, gemm, lhs, rhs)
        and capability >= NATIVE_MX
        and not _is_empty(gemm)
        and lhs.quantizer.has_mx_scales
        and rhs.quantizer.has_mx_scales
    )


def _has_hopper_kernel(capability: float, gemm: Gemm, lhs: Any, rhs: Any) -> bool:
    """Returns whether our GPU kernel for Hopper's FP8 units can multiply the operands."""
    return _fits_block_kernels(capability, gemm, lhs, rhs) and is_for_hopper(
        lhs.quantizer, rhs.quantizer, capability
    )


def _fits_block_kernels(capability: float, gemm: Gemm, lhs: Any, rhs: Any) -> bool:
    """Returns whether the operands have float32 scales per 128 columns, and sizes that the kernels support.

    Under ``jax.export`` a size may be symbolic; no kernel supports that.
    """
    return (
        capability >= NATIVE_FP8
        and _is_per_block(capability, gemm, lhs, rhs)
        and not _is_empty(gemm)
        and lhs.quantizer.scale_columns == rhs.quantizer.scale_columns == BLOCK
        and all(isinstance(size, int) for size in (*lhs.codes.shape, *rhs.codes.shape, *gemm.out_shape))
        and all(
            _padded_size(shape) < _MAX_ELEMENTS
            for shape in (
                lhs.codes.shape,
                rhs.codes.shape,
                (*lhs.codes.shape[:2], rhs.codes.shape[1]),  # the result
            )
        )
    )


def _has_grouped_gemm(
    capability: float, request: ExpertProducts | ExpertSums, lhs: Any, rhs: Any, group_sizes: Any
) -> bool:
    """Returns whether our GPU kernel for Hopper can multiply the operands of a ragged dot."""
    if not (
        is_hopper(capability)
        and isinstance(lhs, QTensor)
        and isinstance(rhs, QTensor)
        and multiplies_dtypes(lhs.codes.dtype, rhs.codes.dtype)
        and jnp.dtype(request.dtype).itemsize <= 4
        # Under jax.export a size may be symbolic.
        and all(isinstance(size, int) and size > 0 for size in (*lhs.codes.shape, *rhs.codes.shape))
    ):
        return False
    quantizers = lhs.quantizer, rhs.quantizer
    if any(quantizer.scales_along_contraction for quantizer in quantizers):
        return all(quantizer.scale_columns == BLOCK for quantizer in quantizers)
    # The kernel supports these numbers of scales: one per tensor, per row or column, or per expert.
    (rows, depth), experts, columns = lhs.codes.shape, group_sizes.size, request.shape[-1]
    of_products = (1, rows), (experts, experts * columns)
    of_sums = (1, depth), (1, columns)
    sizes = of_products if isinstance(request, ExpertProducts) else of_sums
    return (
        has_triton()
        and _padded_size((num_tiles(rows, experts + 1) * TILE, max(depth, columns))) < _MAX_ELEMENTS
        and all(x.scale.size in allowed for x, allowed in zip((lhs, rhs), sizes))
    )


def _can_split_experts(
    capability: float, request: ExpertProducts | ExpertSums, lhs: Any, rhs: Any, group_sizes: Any
) -> bool:
    """Returns whether our rule can split a ragged dot over the devices of a mesh.

    Each device then multiplies its own rows, by codes that it may receive from other devices.
    """
    del request, group_sizes
    if not (
        capability > 0  # if no GPU is known at tracing, the reference runs, and XLA splits it
        and isinstance(lhs, QTensor)
        and isinstance(rhs, QTensor)
    ):
        return False
    is_per_block: bool = lhs.quantizer.scales_along_contraction
    return is_per_block == rhs.quantizer.scales_along_contraction


def _has_block_quantize(capability: float, pair: CastPair, x: Any, scale: Any) -> bool:
    """Returns whether our GPU kernel can quantize a tensor for both of its GEMMs, and helps on this GPU.

    Blackwell does not need the kernel.
    """
    del scale
    quantizer: Any = pair.first
    sizes = (pair.stack, *pair.first_view.matrix_shape)
    return (
        NATIVE_FP8 <= capability < NATIVE_MX
        and has_triton()
        and _is_of_transposed_blocks(pair)
        and quantizer.block in ((1, BLOCK), (BLOCK, BLOCK))
        and quantizer.scale_columns is not None  # scales in float32
        and all(isinstance(size, int) and size > 0 for size in sizes)
        and _padded_size(sizes) < _MAX_ELEMENTS
        # The kernel computes in float32, so it takes no float64.
        and x.dtype.itemsize <= 4
        and not _is_explicit(x)
    )


def _is_of_transposed_blocks(pair: CastPair) -> bool:
    """Returns whether a tensor is quantized in blocks for both GEMMs, as a matrix and as its transpose.

    The second GEMM must contract the rows of the first one. One of the two GEMMs must see the tensor as a
    matrix in memory order, so that a reshape gives that matrix.
    """
    view, other = pair.first_view, pair.second_view
    return (
        pair.first is not None
        and pair.first == pair.second
        and pair.first.scales_along_contraction
        and (view.batch, view.free, view.contract) == (other.batch, other.contract, other.free)
        and sorted(view.order) in (list(view.order), list(other.order))
    )


def _has_block_quantize_on_shards(capability: float, pair: CastPair, x: Any, scale: Any) -> bool:
    """Returns whether our GPU kernel can quantize each device's part of a tensor.

    Rows and columns must be multiples of 128, so that no block is partial.
    """
    is_whole = not any(size % BLOCK for size in pair.first_view.matrix_shape[1:])
    return _has_block_quantize(capability, pair, x, scale) and is_whole


def _quantizes_parts(capability: float, pair: CastPair, x: Any, scale: Any) -> bool:
    """Returns whether each device of a mesh can quantize its part of a tensor, in blocks for both GEMMs.

    XLA alone could not split a dimension that a matrix flattens behind another one, such as a sequence
    behind the batch. It could also split scales over a part of a mesh axis, which ``custom_partitioning``
    does not support.
    """
    del scale
    quantizer: Any = pair.first
    sizes = pair.first_view.matrix_shape[1:]
    return (
        capability > 0
        and _is_of_transposed_blocks(pair)
        and quantizer.block[0] in (1, quantizer.block[1])
        and all(isinstance(size, int) and size > 0 for size in sizes)
        and not _is_explicit(x)
    )


def _is_empty(gemm: Gemm) -> bool:
    """Returns whether a dimension of an operand or of the result has size 0."""
    return 0 in (*gemm.sizes, *gemm.out_shape)


_TABLE: dict[type, tuple[Row, ...]] = {
    Gemm: (
        # One scale per tensor or slice.
        Row(
            _fits_cublaslt,
            partial(cuda.cublaslt, is_row_major=True),
            several=cuda.cublaslt,
            on_shards=partial(_on_shards, name=CUBLASLT),
        ),
        Row(
            _multiplies_codes,
            partial(cuda.xla_kernel, is_row_major=True),
            several=cuda.xla_kernel,
            on_shards=_on_shards,
        ),
        # Scales per block.
        Row(
            _has_block_scaled_units,
            cuda.block_scaled_units,
            several=cuda.block_scaled_units,
            on_shards=_on_shards,
        ),
        Row(
            _has_hopper_kernel,
            cuda.hopper_blocks,
            on_shards=partial(_on_shards, name=BLOCK_GEMM_HOPPER),
        ),
        Row(
            _are_matrices_alike,
            cuda.dequantized_blocks,
            several=cuda.dequantized_blocks,
            on_shards=partial(_on_shards, name=DEQUANTIZED),
        ),
        # No ``on_shards``: with scales per block ``gemm_on_shards`` splits only stacks of matrices.
        Row(_is_per_block, cuda.dequantized_blocks, several=cuda.dequantized_blocks),
    ),
    ExpertProducts: (
        Row(
            _has_grouped_gemm,
            cuda_ragged.expert_products,
            on_shards=cuda_ragged.expert_products_on_shards,
        ),
        Row(
            _can_split_experts,
            _reference,
            several=_reference,
            on_shards=cuda_ragged.products_in_tiles_on_shards,
        ),
    ),
    ExpertSums: (
        Row(
            _has_grouped_gemm,
            cuda_ragged.expert_sums,
            on_shards=cuda_ragged.expert_sums_on_shards,
        ),
        Row(
            _can_split_experts,
            _reference,
            several=_reference,
            on_shards=cuda_ragged.sums_in_tiles_on_shards,
        ),
    ),
    CastPair: (
        Row(
            _has_block_quantize_on_shards,
            cuda_casts.block_pair,
            on_shards=cuda_casts.block_pair_on_shards,
        ),
        Row(_has_block_quantize, cuda_casts.block_pair),
        Row(
            _quantizes_parts,
            _reference,
            several=_reference,
            on_shards=cuda_casts.reference_pair_on_shards,
        ),
    ),
}
