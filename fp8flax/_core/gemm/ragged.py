"""Multiplies the rows of a ragged dot by the kernels of their experts.

On Hopper one GPU kernel multiplies all rows of a device. On other devices the rows are multiplied in tiles,
one after the other, each once for every expert that has rows in it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap

from fp8flax._compat.choice_at_lowering import unless_partitioned
from fp8flax._core.axes import vary_alike
from fp8flax._core.gemm.gemm import Gemm, Operand, multiply
from fp8flax._core.gemm.gpus import compute_capability, has_triton, is_hopper
from fp8flax._core.gemm.kernels.groups import (
    ALIGN,
    TILES_UP_TO,
    before,
    blocks_of_groups,
    ends_of_groups,
    group_of,
    num_tiles,
    table_of,
    transpose_groups,
)
from fp8flax._core.gemm.kernels.on_shards import ragged_on_shards
from fp8flax._core.gemm.kernels.tiled_gemm_hopper import Tile, Tiling, multiplies_dtypes, tiled_gemm
from fp8flax._core.names import GROUPED_GEMM
from fp8flax._core.no_derivative import no_derivative
from fp8flax._core.qtensor import BLOCK, TILE, QTensor

_MAX_ELEMENTS = 2**31
"""Triton counts elements in 32 bits, so our GPU kernels support only fewer elements than this."""


class Ragged(NamedTuple):
    """A product of rows in groups, one group for each expert (hashable).

    Either each row ``(rows, depth)`` is multiplied by the kernel of its expert, ``(experts, …)``, with the
    result ``(rows, columns)``. Rows that belong to no expert become zero. Or, for each expert, the outer
    products of its rows of both operands, ``(rows, depth)`` and ``(rows, columns)``, are summed, with the
    result ``(experts, depth, columns)``.
    """

    gemm: Gemm
    """The product of one tile of rows; its dimension numbers contract the last dimension of the rows and of
    the kernel, or the rows of both operands."""
    out_dtype: np.dtype
    is_sum: bool = False
    is_transposed: bool = False
    """Whether the kernels come as ``(experts, depth, columns)``, not as ``(experts, columns, depth)``."""


def multiply_ragged(ragged: Ragged, a: Operand, b: Operand, group_sizes: jax.Array) -> jax.Array:
    """Returns a product of rows in groups; under ``jax.vmap`` in a loop over the batch.

    Args:
        ragged: what is multiplied.
        a: the rows, a ``QTensor`` or a wide array.
        b: the kernels, or further rows.
        group_sizes: number of rows of each expert, ``(experts,)``, integers.
    """
    run = no_derivative(sequential_vmap(partial(_multiply, ragged)))
    out: jax.Array = run(a, b, group_sizes)
    return out


def _multiply(ragged: Ragged, a: Operand, b: Operand, group_sizes: jax.Array) -> jax.Array:
    """Multiplies in the way of the device that the program is for."""
    in_tiles = partial(_sums_in_tiles if ragged.is_sum else _products_in_tiles, ragged)
    if not (compute_capability() and isinstance(a, QTensor) and isinstance(b, QTensor)):
        return in_tiles(a, b, group_sizes)
    if a.quantizer.scales_along_contraction != b.quantizer.scales_along_contraction:
        return in_tiles(a, b, group_sizes)
    one, name = in_tiles, ""
    if _has_kernel(ragged, a, b, group_sizes):
        one, name = partial(grouped_sums if ragged.is_sum else grouped_products, ragged), GROUPED_GEMM
    # In ``dims`` each dimension has a letter, see ``on_shards``: m rows, k depth, n columns, e experts.
    dims = ("mk", "ekn" if ragged.is_transposed else "enk", "mn")
    dims = ("mk", "mn", "ekn") if ragged.is_sum else dims
    on_shards = partial(ragged_on_shards, one, dims, name=name)
    on_gpu = partial(unless_partitioned, one, in_tiles, on_shards=on_shards)
    out: jax.Array = lax.platform_dependent(a, b, group_sizes, cuda=on_gpu, default=in_tiles)
    return out


def _has_kernel(ragged: Ragged, a: QTensor, b: QTensor, group_sizes: jax.Array) -> bool:
    """Returns whether our GPU kernel for Hopper can multiply the operands."""
    if not (
        is_hopper(compute_capability())
        and multiplies_dtypes(a.codes.dtype, b.codes.dtype)
        and ragged.out_dtype.itemsize <= 4
        # Under jax.export a size may be symbolic.
        and all(isinstance(size, int) and size > 0 for size in (*a.shape, *b.shape))
    ):
        return False
    if a.quantizer.scales_along_contraction:
        return a.quantizer.scale_columns == b.quantizer.scale_columns == BLOCK
    (rows, depth), experts = a.shape, group_sizes.size
    columns = b.shape[-1 if ragged.is_sum or ragged.is_transposed else -2]
    rows_of_tiles = num_tiles(rows, experts + 1) * TILE
    return has_triton() and rows_of_tiles * (max(depth, columns) + BLOCK) < _MAX_ELEMENTS


# In tiles, on any device.

# A tile is multiplied once by the kernel of each expert that has rows in it. Small tiles waste fewer rows.
# Large tiles read each kernel less often, and use more of a GPU. The tile size is a heuristic: half the
# average group size, rounded down to a power of two, within these bounds.
_SMALLEST_TILE, _LARGEST_TILE = 128, 512
_ROW_MULTIPLE = 16  # cublasLt requires it of the sizes of FP8 operands


class _Tiles(NamedTuple):
    """How rows are cut into tiles (hashable)."""

    rows: int
    experts: int

    @property
    def tile(self) -> int:
        """Returns the number of rows in a tile."""
        half = max(1, self.rows // (2 * self.experts))
        tile = min(max(1 << (half.bit_length() - 1), _SMALLEST_TILE), _LARGEST_TILE)
        return min(tile, max(_ROW_MULTIPLE, -(-self.rows // _ROW_MULTIPLE) * _ROW_MULTIPLE))

    @property
    def padded_rows(self) -> int:
        """Returns the number of rows, rounded up to whole tiles; at least one tile."""
        return max(1, -(-self.rows // self.tile)) * self.tile

    @property
    def num_visits(self) -> int:
        """Returns the largest possible number of visits; a tile has one for each expert with rows in it."""
        return self.padded_rows // self.tile + self.experts - 1


class _Visit(NamedTuple):
    """A visit: one tile of rows is multiplied by the kernel of one expert that has rows in it.

    Each field is a scalar. For a list of visits, each field is an array with an element per visit.
    """

    row: jax.Array
    """The first row of the tile."""
    expert: jax.Array
    """The index of the expert."""
    low: jax.Array
    """The expert's first row in the tile, counted from the start of the tile."""
    high: jax.Array
    """The row after the expert's last row in the tile, counted from the start of the tile."""
    is_first: jax.Array
    """Whether the tile is the expert's first one."""


def _products_in_tiles(ragged: Ragged, a: Operand, kernels: Operand, group_sizes: jax.Array) -> jax.Array:
    """Returns each row times the kernel of its expert, in plain JAX."""
    rows, gemm = a.shape[0], ragged.gemm
    tiles = _Tiles(rows, group_sizes.size)
    a, kernels = _in_whole_tiles(tiles, a, gemm.lhs_dtype), _without_blocks(kernels, gemm.rhs_dtype)
    if ragged.is_transposed:  # once, not at each visit: FP8 units sum over the last axis
        kernels = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2) if x.ndim == 3 else x, kernels)
    return _scan_products(tiles, gemm, a, kernels, _visits(tiles, group_sizes))[:rows]


def _sums_in_tiles(ragged: Ragged, a: Operand, b: Operand, group_sizes: jax.Array) -> jax.Array:
    """Returns the sums of the outer products of each expert's rows, in plain JAX."""
    tiles, gemm = _Tiles(a.shape[0], group_sizes.size), ragged.gemm
    a, b = _in_whole_tiles(tiles, a, gemm.lhs_dtype), _in_whole_tiles(tiles, b, gemm.rhs_dtype)
    return _scan_sums(tiles, gemm, ragged.out_dtype, a, b, _visits(tiles, group_sizes))


def _without_blocks(x: Operand, dtype: Any) -> Operand:
    """Returns the values of an operand with scales per block; returns another operand unchanged."""
    return x.dequantize(dtype) if isinstance(x, QTensor) and x.block else x


def _in_whole_tiles(tiles: _Tiles, x: Operand, dtype: Any) -> Operand:
    """Returns rows that zeros fill up to whole tiles."""
    more = tiles.padded_rows - tiles.rows

    def filled(x: jax.Array) -> jax.Array:
        return lax.pad(x, jnp.zeros((), x.dtype), ((0, more, 0), (0, 0, 0)))

    x = _without_blocks(x, dtype)
    if not isinstance(x, QTensor):
        return filled(x)
    scale = filled(x.scale) if _is_per_row(x.scale, tiles.rows) else x.scale
    return dataclasses.replace(x, codes=filled(x.codes), scale=scale)


def _is_per_row(x: jax.Array, rows: int) -> bool:
    """Returns whether codes or scales have an entry for each row; the other scales hold for all rows."""
    return x.ndim == 2 and x.shape[0] == rows > 1


def _visits(tiles: _Tiles, group_sizes: jax.Array) -> _Visit:
    """Returns ``num_visits`` visits, in the order of the rows.

    An expert with rows ``start`` to ``end - 1`` visits tiles ``start // tile`` to ``(end - 1) // tile``. If
    there are fewer visits than ``num_visits``, the rest have the expert of the last visit, and no rows.
    """
    tile = np.int32(tiles.tile)
    ends = ends_of_groups(group_sizes, tiles.rows)
    starts = lax.pad(ends, np.int32(0), [(1, -1, 0)])
    counts = jnp.where(ends > starts, (ends - 1) // tile - starts // tile + 1, 0)
    after = jnp.cumsum(counts, dtype=jnp.int32)
    index = lax.iota(np.int32, tiles.num_visits)
    visit = jnp.maximum(jnp.minimum(index, after[-1] - 1), 0)
    expert = jnp.sum(visit[:, None] >= after[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, np.int32(tiles.experts - 1))  # without any rows, no expert is found
    nth = visit - (after - counts)[expert]
    is_used = index < after[-1]
    row = jnp.where(is_used, (starts[expert] // tile + nth) * tile, 0)
    return _Visit(
        row=row,
        expert=expert,
        low=jnp.maximum(starts[expert] - row, 0),
        high=jnp.where(is_used, jnp.minimum(ends[expert] - row, tile), 0),
        is_first=is_used & (nth == 0),
    )


def _rows_of_expert(tiles: _Tiles, visit: _Visit) -> jax.Array:
    """Returns a mask ``(tile, 1)`` of the rows of a visit's tile that belong to the visit's expert."""
    row = lax.broadcasted_iota(np.int32, (tiles.tile, 1), 0)
    return (row >= visit.low) & (row < visit.high)


def _tile_rows(tiles: _Tiles, operand: Any, row: jax.Array) -> Any:
    """Returns the tile of an operand that starts at ``row``; a scale that all rows share is not cut."""

    def cut(x: jax.Array) -> jax.Array:
        is_per_row = _is_per_row(x, tiles.padded_rows)
        return lax.dynamic_slice_in_dim(x, row, tiles.tile) if is_per_row else x

    return jax.tree.map(cut, operand)


# Jitted, because otherwise each call outside of jit would compile the loop again. Inside of jit,
# ``inline=True`` makes it a part of the surrounding program.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _scan_products(tiles: _Tiles, gemm: Gemm, a: Any, kernels: Any, visits: _Visit) -> jax.Array:
    """Returns each row times the kernel of its expert, ``(padded rows, columns)``; other rows are zeros."""

    def step(out: jax.Array, visit: _Visit) -> tuple[jax.Array, None]:
        kernel = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, visit.expert, keepdims=False), kernels)
        if isinstance(kernel, QTensor) and kernel.scale.size == 1:
            kernel = dataclasses.replace(kernel, scale=kernel.scale.reshape(()))
        product = multiply(gemm, _tile_rows(tiles, a, visit.row), kernel)
        before = lax.dynamic_slice_in_dim(out, visit.row, tiles.tile)
        rows = jnp.where(_rows_of_expert(tiles, visit), product, before)
        return lax.dynamic_update_slice_in_dim(out, rows, visit.row, 0), None

    zeros = jnp.zeros((tiles.padded_rows, kernels.shape[1]), gemm.out_dtype)
    return lax.scan(step, _varying_as((a, kernels, visits), zeros)[0], visits)[0]


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _scan_sums(tiles: _Tiles, gemm: Gemm, dtype: Any, a: Any, b: Any, visits: _Visit) -> jax.Array:
    """Returns for each expert the sum of outer products over its rows, ``(experts, depth, columns)``."""

    def step(carry: tuple[jax.Array, jax.Array], visit: _Visit) -> tuple[Any, None]:
        total, out = carry
        is_of_expert = _rows_of_expert(tiles, visit)
        # Rows of other experts are set to zero in both operands: zero times a NaN would be NaN.
        of_visit = (_with_zeros(is_of_expert, _tile_rows(tiles, x, visit.row)) for x in (a, b))
        product = multiply(gemm, *of_visit)
        total = jnp.where(visit.is_first, jnp.zeros_like(total), total) + product
        # All visits of an expert follow each other, so its last visit writes its whole sum.
        return (total, lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), visit.expert, 0)), None

    shape = a.shape[1], b.shape[1]
    total, out = jnp.zeros(shape, gemm.out_dtype), jnp.zeros((tiles.experts, *shape), dtype)
    total, out = _varying_as((a, b, visits), total, out)
    return lax.scan(step, (total, out), visits)[0][1]


def _with_zeros(keep: jax.Array, operand: Any) -> Any:
    """Returns a tile of an operand with zeros in the rows that ``keep`` excludes."""
    x = operand.codes if isinstance(operand, QTensor) else operand
    x = jnp.where(keep, x, np.zeros((), x.dtype))
    return dataclasses.replace(operand, codes=x) if isinstance(operand, QTensor) else x


def _varying_as(tree: Any, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, varying over all manual axes that a leaf of the tree varies over."""
    return vary_alike(*arrays, *jax.tree.leaves(tree))[: len(arrays)]


# By our GPU kernel for Hopper.


def _tiling_of_rows(rows: int, depth: int, columns: int, experts: int) -> Tiling:
    """Returns the tiling that multiplies each row by its expert's kernel; rows without expert become zero.

    Args:
        rows: number of rows of the input, ``TILE`` or more, and a multiple of 8.
        depth: number of columns of the input and of each kernel.
        columns: number of columns of the result, and of rows of each kernel.
        experts: number of kernels.
    """

    def tile(table: Any, t: Any) -> Tile:
        group = group_of(table, t, experts + 1)
        # The last tile begins earlier if it would otherwise reach beyond the input.
        row = lax.min(group.row, np.int32(rows - TILE))
        moved = group.row - row
        is_expert = group.index < experts
        return Tile(
            lhs_row=row,
            rhs_row=lax.select(is_expert, group.index * np.int32(columns), jnp.int32(0)),
            block=jnp.int32(0),
            num_blocks=lax.select(is_expert, jnp.int32(depth // BLOCK), jnp.int32(0)),
            out_row=row,
            low=moved + group.low,
            high=moved + group.high,
        )

    return Tiling(rows, columns, num_tiles(rows, experts + 1), is_whole=False, tile=tile)


def _tiling_of_groups(depth: int, columns: int, experts: int) -> Tiling:
    """Returns the tiling that sums the outer products of each expert's rows.

    Both operands are transposed: their columns are the rows of all experts, in blocks of one expert each,
    expert by expert. The sum of an expert runs over its blocks.

    Args:
        depth: number of rows of the transposed left operand, a multiple of ``TILE``.
        columns: number of rows of the transposed right operand.
        experts: number of experts.
    """
    tiles = np.int32(depth // TILE)

    def tile(table: Any, t: Any) -> Tile:
        expert, row = lax.div(t, tiles), lax.rem(t, tiles) * np.int32(TILE)
        first = before(table, TILES_UP_TO, expert)
        return Tile(
            lhs_row=row,
            rhs_row=jnp.int32(0),
            block=first,
            num_blocks=table[TILES_UP_TO, expert] - first,
            out_row=expert * np.int32(depth) + row,
            low=jnp.int32(0),
            high=jnp.int32(TILE),
        )

    return Tiling(experts * depth, columns, experts * int(tiles), is_whole=True, tile=tile)


def grouped_products(
    ragged: Ragged, a: QTensor, kernels: QTensor, group_sizes: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """Multiplies each row by its expert's kernel, ``(rows, columns)``, by one GPU kernel."""
    codes, scale = kernels.codes, kernels.scale
    if ragged.is_transposed:
        codes, scale = (jnp.swapaxes(x, 1, 2) if x.ndim == 3 else x for x in (codes, scale))
    (rows, depth), (experts, columns, _) = a.shape, codes.shape
    filled_rows, filled_depth, filled_columns = max(_up(rows, ALIGN), TILE), _up(depth), _up(columns)
    left = _filled(a.codes, filled_rows, filled_depth)
    right = _filled(codes, experts, filled_columns, filled_depth).reshape(-1, filled_depth)
    if a.block:
        blocks = filled_depth // BLOCK
        lhs_scale = _filled(_per_row(a.scale, a.block[0], rows).T, blocks, filled_rows)
        height = kernels.block[2 if ragged.is_transposed else 1]
        if height % BLOCK == 0:  # one scale per 128 rows of the kernel
            rhs_scale = jnp.repeat(scale, height // BLOCK, axis=1)[:, : filled_columns // BLOCK]
        else:
            rhs_scale = jax.vmap(lambda x: _per_row(x, height, columns))(scale)
            rhs_scale = _filled(rhs_scale, experts, filled_columns, blocks)
        rhs_scale = jnp.moveaxis(rhs_scale, 2, 0).reshape(blocks, -1)
    else:
        lhs_scale, rhs_scale = a.scale.reshape(-1), scale.reshape(-1)
        if lhs_scale.size > 1:
            lhs_scale = _filled(lhs_scale, filled_rows)
        if rhs_scale.size > experts:
            rhs_scale = _filled(rhs_scale.reshape(experts, columns), experts, filled_columns).reshape(-1)
        elif rhs_scale.size < experts:
            rhs_scale = jnp.broadcast_to(rhs_scale, (experts,))
    tiling = _tiling_of_rows(filled_rows, filled_depth, filled_columns, experts)
    table = table_of(filled_rows, group_sizes)
    out = _by_kernel(tiling, ragged.out_dtype, interpret, left, right, lhs_scale, rhs_scale, table)
    return out[:rows, :columns]


def grouped_sums(
    ragged: Ragged, a: QTensor, b: QTensor, group_sizes: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """Sums the outer products of the rows of each expert, ``(experts, depth, columns)``, by one GPU kernel.

    It puts the rows of each expert into whole tiles first.
    """
    (rows, depth), columns, experts = a.shape, b.shape[1], group_sizes.size
    rows = _up(rows) if a.block else max(_up(rows, ALIGN), TILE)
    table = table_of(rows, group_sizes, TILE) if a.block else table_of(rows, group_sizes)

    def side_by_side(x: QTensor) -> tuple[jax.Array, jax.Array]:
        """Returns codes with the rows of all experts as columns, in blocks of one expert, and scales."""
        size = x.shape[1]
        if x.block:
            scales = _per_row(x.scale.T, x.block[1], size).T
            scales = _filled(scales, rows // BLOCK, _up(size))
            return blocks_of_groups(_filled(x.codes.T, _up(size), rows), scales, table)
        codes = _filled(x.codes, rows, _up(size))
        codes, scale = transpose_groups(codes, table, interpret=interpret is not None), x.scale.reshape(-1)
        return codes, scale if scale.size == 1 else _filled(scale, _up(size))

    (left, lhs_scale), (right, rhs_scale) = side_by_side(a), side_by_side(b)
    tiling = _tiling_of_groups(left.shape[0], right.shape[0], experts)
    out = _by_kernel(tiling, ragged.out_dtype, interpret, left, right, lhs_scale, rhs_scale, table)
    return out.reshape(experts, left.shape[0], right.shape[0])[:, :depth, :columns]


def _per_row(scale: jax.Array, height: int, rows: int) -> jax.Array:
    """Returns scales ``(rows, blocks)``, one per row, from those of blocks of ``height`` rows."""
    return jnp.repeat(scale, height, axis=0)[:rows]


def _by_kernel(tiling: Tiling, out_dtype: Any, interpret: Any, *operands: jax.Array) -> jax.Array:
    """Calls ``tiled_gemm``."""
    lhs, rhs, lhs_scale, rhs_scale, table = operands
    scales = lhs_scale.astype(jnp.float32), rhs_scale.astype(jnp.float32)
    # Pallas's pipeline divides an int32 by Python integers, which would be int64 under jax_enable_x64.
    with jax.named_scope(GROUPED_GEMM), jax.enable_x64(False):
        return tiled_gemm(
            lhs,
            rhs,
            *scales,
            table,
            tiling=tiling,
            out_dtype=out_dtype,
            name=GROUPED_GEMM,
            interpret=interpret,
        )


def _up(size: int, multiple: int = BLOCK) -> int:
    """Rounds a size up to a multiple of ``multiple``."""
    return -(-size // multiple) * multiple


def _filled(x: jax.Array, *sizes: int) -> jax.Array:
    """Pads an array with zeros at the end of each dimension, to these sizes."""
    if x.shape == sizes:
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, size - have, 0) for size, have in zip(sizes, x.shape)])
