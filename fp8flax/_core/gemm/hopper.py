"""Our GPU kernel for Hopper's FP8 units: for float32 scales per 128 columns, and for experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.formats import OCP_DTYPES
from fp8flax._core.gemm.gemm import (
    SCALE_COLUMNS,
    TILE,
    Gemm,
    GemmSizes,
    are_positive,
    as_matrices,
    from_matrices,
)
from fp8flax._core.gemm.gpus import fits_kernels, is_hopper
from fp8flax._core.gemm.hopper_kernel import Index, Step, tiled_gemm
from fp8flax._core.gemm.ragged import Visits, is_of_expert, visits_of
from fp8flax._core.names import BLOCK_GEMM_HOPPER, GROUPED_GEMM
from fp8flax._core.qtensor import Dims, QTensor, padded, round_up
from fp8flax._core.quantizers import Quantizer


def supports(gemm: Gemm, lhs: Quantizer, rhs: Quantizer, sizes: GemmSizes, capability: float) -> bool:
    """Returns whether the GPU kernel multiplies codes of two quantizers."""
    if not (lhs.scale_columns == rhs.scale_columns == SCALE_COLUMNS and are_positive(sizes)):
        return False
    m, k, n = (round_up(size, TILE) for size in sizes[1:])
    shapes = (sizes.batch, m, k), (sizes.batch, n, k), (sizes.batch, m, n)
    return multiplies(lhs, rhs, capability) and fits_kernels(*shapes)


def multiplies(lhs: Quantizer, rhs: Quantizer, capability: float) -> bool:
    """Returns whether the units of a GPU multiply codes of two quantizers by ``wgmma``."""
    # From JAX 0.11 on ``wgmma`` takes operands of two different FP8 dtypes.
    is_one_dtype = lhs.dtype == rhs.dtype or jax.__version_info__ >= (0, 11)
    return is_hopper(capability) and {lhs.dtype, rhs.dtype} <= OCP_DTYPES and is_one_dtype


def compute(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies by the GPU kernel. In the right operand 128 rows share a scale, or each has its own."""
    left, left_scale = operand(a, gemm.lhs)
    right, right_scale = operand(b, gemm.rhs, TILE if b.quantizer.block[0] % TILE == 0 else 1)
    batch = gemm.sizes(a, b).batch
    rows, columns = (x.shape[0] // batch for x in (left, right))

    def step(t: Index, s: Index) -> Step:
        matrix = lax.div(t, np.int32(rows // TILE))
        return Step(lhs=t, rhs=matrix * np.int32(columns // TILE), depth=s, scale=t)

    out = tiled_gemm(
        left,
        right,
        left_scale,
        right_scale,
        num_steps=lambda t: left.shape[1] // SCALE_COLUMNS,
        step=step,
        shape=(batch * rows, columns),
        out_dtype=jnp.float32 if gemm.out_dtype == jnp.float64 else gemm.out_dtype,
        name=BLOCK_GEMM_HOPPER,
    )
    return from_matrices(gemm, a, b, out.reshape(batch, rows, columns))


def operand(x: QTensor, dims: Dims, rows_per_scale: int = 1) -> tuple[jax.Array, jax.Array]:
    """Returns an operand as the GPU kernel takes it: its matrices one below the other, and their scales.

    The codes are ``(batch * rows, columns)``, filled up with zeros to multiples of 128. The scales are
    ``(columns / 128, batch * rows / rows_per_scale)``: the kernel fetches the scales of the rows of a tile.
    Scales of larger blocks, or of whole slices, are repeated.
    """
    height = x.block[dims.free[-1]] if x.block and dims.free else 1
    codes = as_matrices(x.codes, dims)
    scale = as_matrices(x.scale.astype(jnp.float32).reshape(x.scale.shape or (1,) * x.ndim), dims)
    batch, rows, columns = codes.shape
    filled = round_up(rows, TILE), round_up(columns, SCALE_COLUMNS)
    num_scales = filled[0] // rows_per_scale, filled[1] // SCALE_COLUMNS
    if scale.shape[1] > 1:
        scale = jnp.repeat(scale, height // rows_per_scale, axis=1)
        scale = padded(scale, (scale.shape[0], num_scales[0], scale.shape[2]))
    scale = jnp.moveaxis(jnp.broadcast_to(scale, (batch, *num_scales)), 2, 0)
    return padded(codes, (batch, *filled)).reshape(-1, filled[1]), scale.reshape(num_scales[1], -1)


# The products of all experts of a ragged dot at once.


def supports_experts(
    gemm: Gemm, lhs: Quantizer, rhs: Quantizer, sizes: GemmSizes, capability: float
) -> bool:
    """Returns whether the GPU kernel multiplies codes of two quantizers."""
    has_scales = all(x.block is None or x.scale_columns == SCALE_COLUMNS for x in (lhs, rhs))
    has_dtypes = multiplies(lhs, rhs, capability) and gemm.out_dtype.itemsize <= 4
    return has_scales and has_dtypes and are_positive(sizes)


def compute_experts(gemm: Gemm, a: QTensor, b: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Multiplies rows by the kernels of their experts, or sums over the rows of each expert."""
    return (grouped_sums if b.ndim == 2 else grouped_products)(gemm, a, b, group_sizes)


def grouped_products(gemm: Gemm, a: QTensor, kernels: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each row by its expert's kernel, ``(rows, columns)``.

    A tile of the result is a sum over the visits to the tile. In each visit the scales of the rows of other
    experts are zero, and the GPU kernel skips these rows: zero times a NaN of the expert would be NaN.
    """
    (left, left_scale), (right, right_scale) = (
        operand(a, gemm.lhs),
        operand(kernels, gemm.rhs),
    )
    (filled_rows, depth), columns = left.shape, gemm.sizes(a, kernels).n
    filled_columns = round_up(columns, TILE)
    num_steps, num_columns = np.int32(depth // SCALE_COLUMNS), np.int32(filled_columns // TILE)
    visits = visits_of(filled_rows, TILE, group_sizes)
    index = visits.row // np.int32(TILE)
    of_visits = jnp.take(left_scale.reshape(-1, filled_rows // TILE, TILE), index, axis=1, mode="clip")
    of_visits = jnp.where(is_of_expert(TILE, visits.low, visits.high)[None], of_visits, np.float32(0))

    tile = lax.broadcasted_iota(np.int32, (filled_rows // TILE, index.size), 0)
    is_before, is_of_tile = index[None] < tile, index[None] == tile
    is_used = visits.high[None] > 0
    first, number = (jnp.sum(x & is_used, axis=1, dtype=jnp.int32) for x in (is_before, is_of_tile))

    def step(t: Index, s: Index, first: Index, number: Index, experts: Index) -> Step:
        visit = first[t] + lax.div(s, num_steps)
        return Step(t, experts[visit] * num_columns, lax.rem(s, num_steps), visit)

    out = tiled_gemm(
        left,
        right,
        of_visits.reshape(num_steps, -1),
        right_scale,
        first,
        number,
        visits.expert,
        num_steps=lambda t, first, number, experts: number[t] * num_steps,
        step=step,
        shape=(filled_rows, filled_columns),
        out_dtype=gemm.out_dtype,
        name=GROUPED_GEMM,
        skips_rows=True,
    )
    return out[: a.shape[0], :columns]


def grouped_sums(gemm: Gemm, a: QTensor, b: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Sums the outer products of the rows of each expert, ``(experts, depth, columns)``.

    XLA first puts the tiles of all visits side by side, so that the sum of an expert runs over whole tiles.
    """
    visits = visits_of(round_up(a.shape[0], TILE), TILE, group_sizes)
    left, left_scale = _side_by_side(*operand(a, gemm.lhs), visits)
    right, right_scale = _side_by_side(*operand(b, gemm.rhs), visits)
    filled_depth, filled_columns = left.shape[0], right.shape[0]
    num_tiles = np.int32(filled_depth // TILE)

    def step(t: Index, s: Index, first: Index, number: Index) -> Step:
        row = lax.rem(t, num_tiles)
        return Step(row, 0, first[lax.div(t, num_tiles)] + s, row)

    out = tiled_gemm(
        left,
        right,
        left_scale,
        right_scale,
        visits.first,
        visits.number,
        num_steps=lambda t, first, number: number[lax.div(t, num_tiles)],
        step=step,
        shape=(group_sizes.size * filled_depth, filled_columns),
        out_dtype=gemm.out_dtype,
        name=GROUPED_GEMM,
    )
    return out.reshape(-1, filled_depth, filled_columns)[:, : a.shape[1], : b.shape[1]]


def _side_by_side(codes: jax.Array, scale: jax.Array, visits: Visits) -> tuple[jax.Array, jax.Array]:
    """Returns codes with the rows of all visits as columns, zeros in rows of others, and their scales."""
    index = visits.row // np.int32(TILE)
    # Codes are copied as 32-bit words: XLA's kernel moves four elements at once, whether bytes or words.
    mask = is_of_expert(TILE, visits.low, visits.high).reshape(-1, TILE // 4, 4)
    mask = jnp.where(mask, np.uint8(255), np.uint8(0))
    # Without the barrier XLA would gather single bytes of the codes that are not transposed.
    codes = lax.optimization_barrier(codes)
    words = lax.bitcast_convert_type(codes.reshape(len(codes), -1, TILE // 4, 4), jnp.uint32)
    words = jnp.take(words, index, axis=1, mode="clip") & lax.bitcast_convert_type(mask, jnp.uint32)[None]
    codes = lax.bitcast_convert_type(words, codes.dtype).reshape(len(codes), -1)
    return codes, jnp.take(scale, index, axis=0, mode="clip")
