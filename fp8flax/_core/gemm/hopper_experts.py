"""The products of all experts of a ragged dot at once, by the GPU kernel of ``hopper``.

The rows are cut into tiles of 128. A tile may hold rows of several experts; each of them *visits* the tile
(``ragged.Visits``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.gemm import hopper
from fp8flax._core.gemm.gemm import SCALE_COLUMNS, TILE, Gemm
from fp8flax._core.gemm.gpus import fits_kernels
from fp8flax._core.gemm.hopper import Index, Operand, Step, operand
from fp8flax._core.gemm.ragged import Visits, is_of_expert, visits_of
from fp8flax._core.names import GROUPED_GEMM
from fp8flax._core.qtensor import QTensor, round_up


def supports(gemm: Gemm, a: QTensor, b: QTensor, num_experts: int, capability: float) -> bool:
    """Returns whether the GPU kernel multiplies two operands with positive sizes; see ``compute``."""
    quantizers = a.quantizer, b.quantizer
    has_scales = all(x.block is None or x.scale_columns == SCALE_COLUMNS for x in quantizers)
    has_dtypes = hopper.multiplies(*quantizers, capability) and gemm.out_dtype.itemsize <= 4
    depth, columns = (round_up(size, TILE) for size in (a.shape[1], gemm.sizes(a, b).n))
    return has_scales and has_dtypes and fits_kernels(a.shape, (num_experts, depth, columns))


def compute(gemm: Gemm, a: QTensor, b: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Multiplies rows by the kernels of their experts, or sums over the rows of each expert."""
    return (_sums if b.ndim == 2 else _products)(gemm, a, b, group_sizes)


def _products(gemm: Gemm, a: QTensor, kernels: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each row by its expert's kernel, ``(rows, columns)``.

    A tile of the result is a sum over the visits to the tile. In each visit the scales of the rows of other
    experts are zero, and the GPU kernel skips these rows: zero times a NaN of the expert would be NaN.
    """
    left, left_scale = operand(a, gemm.lhs)
    (filled_rows, depth), columns = left.shape, gemm.sizes(a, kernels).n
    filled_columns = round_up(columns, TILE)
    num_tiles, steps_of_visit = filled_rows // TILE, np.int32(depth // SCALE_COLUMNS)
    tiles_of_kernel = np.int32(filled_columns // TILE)
    visits = visits_of(filled_rows, TILE, group_sizes)
    tile_of_visit = visits.row // np.int32(TILE)
    scales = jnp.take(left_scale.reshape(-1, num_tiles, TILE), tile_of_visit, axis=1, mode="clip")
    scales = jnp.where(is_of_expert(TILE, visits.low, visits.high)[None], scales, np.float32(0))

    # For each tile the index of its first visit, and the number of its visits.
    tile = lax.broadcasted_iota(np.int32, (num_tiles, tile_of_visit.size), 0)
    is_before, is_of_tile = tile_of_visit[None] < tile, tile_of_visit[None] == tile
    is_used = visits.high[None] > 0
    first, number = (jnp.sum(x & is_used, axis=1, dtype=jnp.int32) for x in (is_before, is_of_tile))

    def step(t: Index, s: Index, first: Index, number: Index, experts: Index) -> Step:
        visit = first[t] + lax.div(s, steps_of_visit)
        return Step(t, experts[visit] * tiles_of_kernel, lax.rem(s, steps_of_visit), visit)

    out = hopper.tiled_gemm(
        (left, scales.reshape(steps_of_visit, -1)),
        operand(kernels, gemm.rhs),
        first,
        number,
        visits.expert,
        num_steps=lambda t, first, number, experts: number[t] * steps_of_visit,
        step=step,
        shape=(filled_rows, filled_columns),
        out_dtype=gemm.out_dtype,
        name=GROUPED_GEMM,
        skips_rows=True,
    )
    return out[: a.shape[0], :columns]


def _sums(gemm: Gemm, a: QTensor, b: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Sums the outer products of the rows of each expert, ``(experts, depth, columns)``.

    XLA first puts the tiles of all visits side by side, so that the sum of an expert runs over whole tiles.
    Then each step of the GPU kernel is a visit.
    """
    visits = visits_of(round_up(a.shape[0], TILE), TILE, group_sizes)
    left, right = (_side_by_side(*operand(x, dims), visits) for x, dims in ((a, gemm.lhs), (b, gemm.rhs)))
    filled_depth, filled_columns = len(left[0]), len(right[0])
    tiles_of_expert = np.int32(filled_depth // TILE)

    def step(t: Index, s: Index, first: Index, number: Index) -> Step:
        row = lax.rem(t, tiles_of_expert)
        return Step(row, 0, first[lax.div(t, tiles_of_expert)] + s, row)

    out = hopper.tiled_gemm(
        left,
        right,
        visits.first,
        visits.number,
        num_steps=lambda t, first, number: number[lax.div(t, tiles_of_expert)],
        step=step,
        shape=(group_sizes.size * filled_depth, filled_columns),
        out_dtype=gemm.out_dtype,
        name=GROUPED_GEMM,
    )
    return out.reshape(-1, filled_depth, filled_columns)[:, : a.shape[1], : b.shape[1]]


def _side_by_side(codes: jax.Array, scale: jax.Array, visits: Visits) -> Operand:
    """Returns codes with the rows of all visits as columns, zeros in rows of others, and their scales."""
    tile_of_visit = visits.row // np.int32(TILE)
    # Codes are copied as 32-bit words: XLA's kernel moves four elements at once, whether bytes or words.
    mask = is_of_expert(TILE, visits.low, visits.high).reshape(-1, TILE // 4, 4)
    mask = jnp.where(mask, np.uint8(255), np.uint8(0))
    # Without the barrier XLA would gather single bytes of the codes that are not transposed.
    codes = lax.optimization_barrier(codes)
    words = lax.bitcast_convert_type(codes.reshape(len(codes), -1, TILE // 4, 4), jnp.uint32)
    words = jnp.take(words, tile_of_visit, axis=1, mode="clip")
    words = words & lax.bitcast_convert_type(mask, jnp.uint32)[None]
    codes = lax.bitcast_convert_type(words, codes.dtype).reshape(len(codes), -1)
    return codes, jnp.take(scale, tile_of_visit, axis=0, mode="clip")
