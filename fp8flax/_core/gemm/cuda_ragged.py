"""The ways in which NVIDIA GPUs multiply a ragged dot: by one GPU kernel on Hopper, otherwise in tiles.

The table in ``lowering`` says which of these functions runs for which request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap

from fp8flax._core.gemm.kernels.groups import (
    ALIGN,
    TILES_UP_TO,
    before,
    blocks_of_groups,
    group_of,
    num_tiles,
    table_of,
    transpose_groups,
)
from fp8flax._core.gemm.kernels.on_shards import ragged_on_shards
from fp8flax._core.gemm.kernels.tiled_gemm_hopper import Tile, Tiling, tiled_gemm
from fp8flax._core.gemm.request import ExpertProducts, ExpertSums, transposed_kernels
from fp8flax._core.names import GROUPED_GEMM
from fp8flax._core.qtensor import BLOCK, TILE, QTensor, View


def expert_products(
    request: ExpertProducts, lhs: QTensor, kernels: QTensor, group_sizes: jax.Array
) -> jax.Array:
    """Multiplies each row by its expert's kernel, by one GPU kernel; see ``grouped_products``."""
    rows, columns = request.shape
    return _products_of_part(request, lhs, kernels, group_sizes)[:rows, :columns]


def expert_products_on_shards(
    request: ExpertProducts, lhs: QTensor, kernels: QTensor, group_sizes: jax.Array
) -> jax.Array:
    """Multiplies as ``expert_products``; each of several devices computes a part."""
    of_part = partial(_products_of_part, request)
    return _products_on_shards(request, of_part, lhs, kernels, group_sizes, name=GROUPED_GEMM)


def _products_of_part(
    request: ExpertProducts, lhs: QTensor, kernels: QTensor, group_sizes: jax.Array
) -> jax.Array:
    """Returns ``grouped_products`` of the operands of a request, or of one device's parts of them."""
    if request.transposes_kernels and not kernels.quantizer.scales_along_contraction:
        kernels = transposed_kernels(kernels)
    return grouped_products(lhs, kernels, group_sizes, out_dtype=request.dtype)


def expert_sums(request: ExpertSums, lhs: QTensor, rhs: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Sums the outer products of each expert's rows, by one GPU kernel; see ``grouped_sums``."""
    _, depth, columns = request.shape
    return grouped_sums(lhs, rhs, group_sizes, out_dtype=request.dtype)[:, :depth, :columns]


def expert_sums_on_shards(
    request: ExpertSums, lhs: QTensor, rhs: QTensor, group_sizes: jax.Array
) -> jax.Array:
    """Sums as ``expert_sums``; each of several devices computes a part."""
    of_part = partial(grouped_sums, out_dtype=request.dtype)
    return _sums_on_shards(request, of_part, lhs, rhs, group_sizes, name=GROUPED_GEMM)


def products_in_tiles_on_shards(
    request: ExpertProducts, lhs: QTensor, kernels: QTensor, group_sizes: jax.Array
) -> jax.Array:
    """Multiplies each row by its expert's kernel in tiles; each of several devices computes a part.

    XLA alone would gather the rows of each tile.
    """
    of_part = partial(request.reference, is_part=True)
    return _products_on_shards(request, of_part, lhs, kernels, group_sizes)


def sums_in_tiles_on_shards(
    request: ExpertSums, lhs: QTensor, rhs: QTensor, group_sizes: jax.Array
) -> jax.Array:
    """Sums the outer products of each expert's rows in tiles; each of several devices computes a part."""
    of_part = partial(request.reference, is_part=True)
    return _sums_on_shards(request, of_part, lhs, rhs, group_sizes)


def _products_on_shards(
    request: ExpertProducts,
    of_part: Callable[..., jax.Array],
    lhs: QTensor,
    kernels: QTensor,
    group_sizes: jax.Array,
    *,
    name: str = "",
) -> jax.Array:
    """Returns the result of ``request``; on each of several devices ``of_part`` multiplies its parts.

    ``name`` is the scope in which ``of_part`` runs; empty for none.
    """
    rows, columns = request.shape
    # In ``dims`` each dimension has a letter, see ``on_shards``: m rows, k depth, n columns, e experts.
    if not kernels.quantizer.scales_along_contraction:
        dims = "mk", "ekn" if request.transposes_kernels else "enk", "mn"
        return ragged_on_shards(of_part, dims, lhs, kernels, group_sizes, name=name)[:rows, :columns]
    # Devices exchange square blocks in the order of the kernel, as in ``gemm_on_shards``: the kernels are
    # swapped before the exchange, and each device swaps its part back.
    view = View(kernels.codes.shape[2:], (1,), ())
    is_swapped = request.transposes_kernels and kernels.quantizer.serves(kernels.quantizer, view)

    def swapped(kernels: QTensor) -> QTensor:
        return jax.vmap(kernels.quantizer.transpose)(kernels) if is_swapped else kernels

    def multiply(lhs: QTensor, kernels: QTensor, group_sizes: jax.Array) -> jax.Array:
        return of_part(lhs, swapped(kernels), group_sizes)

    dims = "-mk", "e-kn" if is_swapped else "e-nk", "mn"
    out = ragged_on_shards(multiply, dims, lhs, swapped(kernels), group_sizes, name=name)
    return out[:rows, :columns]


def _sums_on_shards(
    request: ExpertSums,
    of_part: Callable[..., jax.Array],
    lhs: QTensor,
    rhs: QTensor,
    group_sizes: jax.Array,
    *,
    name: str = "",
) -> jax.Array:
    """Returns the result of ``request``, see ``_products_on_shards``."""
    dims = ("mk", "mn", "ekn") if lhs.codes.ndim == 2 else ("-km", "-nm", "ekn")
    _, depth, columns = request.shape
    return ragged_on_shards(of_part, dims, lhs, rhs, group_sizes, name=name)[:, :depth, :columns]


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
    lhs: QTensor, kernels: QTensor, group_sizes: jax.Array, *, out_dtype: Any, interpret: Any = None
) -> jax.Array:
    """Multiplies each row by its expert's kernel: ``(rows, columns)``, zeros for rows without expert.

    It pads the operands to whole tiles and calls ``tiled_gemm`` once. ``expert_products`` calls it, on
    one device, or on each of several devices for its part.

    Args:
        lhs: codes ``(rows, depth)``; with scales per block ``(1, rows, depth)``.
        kernels: codes ``(experts, columns, depth)``; with scales per block
            ``(experts, 1, columns, depth)``.
        group_sizes: number of rows of each expert, ``(experts,)``.
        out_dtype: dtype of the result.
        interpret: see ``tiled_gemm``.
    """
    (rows, depth), columns, experts = lhs.codes.shape[-2:], kernels.codes.shape[-2], group_sizes.size
    filled_rows, filled_depth, filled_columns = max(_up(rows, ALIGN), TILE), _up(depth), _up(columns)
    left = _filled(lhs.codes.reshape(rows, depth), filled_rows, filled_depth)
    right = kernels.codes.reshape(experts, columns, depth)
    right = _filled(right, experts, filled_columns, filled_depth).reshape(-1, filled_depth)
    if lhs.quantizer.scales_along_contraction:
        lhs_scale = _filled(_block_scales(lhs, 1), depth // BLOCK, filled_rows)
        # Square blocks have a scale per 128 rows, other blocks one per row.
        rhs_scale = jax.vmap(partial(_block_scales, rows=BLOCK))(kernels)
        if rhs_scale is None:
            rhs_scale = jax.vmap(partial(_block_scales, rows=1))(kernels)
            rhs_scale = _filled(rhs_scale, experts, depth // BLOCK, filled_columns)
        rhs_scale = jnp.swapaxes(rhs_scale, 0, 1).reshape(depth // BLOCK, -1)
    else:
        lhs_scale, rhs_scale = lhs.scale.reshape(-1), kernels.scale.reshape(experts, -1)
        if lhs_scale.size > 1:
            lhs_scale = _filled(lhs_scale, filled_rows)
        if rhs_scale.size > experts:
            rhs_scale = _filled(rhs_scale, experts, filled_columns)
        rhs_scale = rhs_scale.reshape(-1)
    tiling = _tiling_of_rows(filled_rows, filled_depth, filled_columns, experts)
    table = table_of(filled_rows, group_sizes)
    out = _multiply(tiling, out_dtype, interpret, left, right, lhs_scale, rhs_scale, table)
    return out[:rows, :columns]


def grouped_sums(
    lhs: QTensor, rhs: QTensor, group_sizes: jax.Array, *, out_dtype: Any, interpret: Any = None
) -> jax.Array:
    """Sums the outer products of the rows of each expert: ``(experts, depth, columns)``.

    It puts the rows of each expert into whole tiles and calls the GPU kernel ``tiled_gemm`` once.
    ``expert_sums`` calls it, on one device, or on each of several devices for its part.

    Args:
        lhs: codes ``(rows, depth)``; with scales per block ``(1, depth, rows)``.
        rhs: codes ``(rows, columns)``; with scales per block ``(1, columns, rows)``.
        group_sizes: number of rows of each expert, ``(experts,)``.
        out_dtype: dtype of the result.
        interpret: see ``tiled_gemm``.
    """
    is_per_block, experts = lhs.quantizer.scales_along_contraction, group_sizes.size
    depth, columns = (x.codes.shape[1] for x in (lhs, rhs))
    rows = lhs.codes.shape[2] if is_per_block else max(_up(lhs.codes.shape[0], ALIGN), TILE)
    table = table_of(rows, group_sizes, TILE) if is_per_block else table_of(rows, group_sizes)

    def side_by_side(x: QTensor) -> tuple[jax.Array, jax.Array]:
        """Returns codes with the rows of all experts as columns, in blocks of one expert, and scales."""
        size, scale = x.codes.shape[1], x.scale.reshape(-1)
        if is_per_block:
            scales = _filled(_block_scales(x, 1), rows // BLOCK, _up(size))
            return blocks_of_groups(_filled(x.codes[0], _up(size), rows), scales, table)
        codes = _filled(x.codes, rows, _up(size))
        codes = transpose_groups(codes, table, interpret=interpret is not None)
        return codes, scale if scale.size == 1 else _filled(scale, _up(size))

    (left, lhs_scale), (right, rhs_scale) = side_by_side(lhs), side_by_side(rhs)
    tiling = _tiling_of_groups(left.shape[0], right.shape[0], experts)
    out = _multiply(tiling, out_dtype, interpret, left, right, lhs_scale, rhs_scale, table)
    return out.reshape(experts, left.shape[0], right.shape[0])[:, :depth, :columns]


def _block_scales(x: QTensor, rows: int) -> Any:
    """Returns the scales of a matrix, each for ``rows`` rows and 128 columns; the column blocks come first.

    Returns None if the scales of ``x`` cannot be written in this form.
    """
    scale = x.quantizer.block_scale(x, rows)
    return None if scale is None else scale[0].T


def _multiply(tiling: Tiling, out_dtype: Any, interpret: Any, *operands: jax.Array) -> jax.Array:
    """Calls ``tiled_gemm``; under ``jax.vmap`` in a loop, once for each element of the batch."""

    @sequential_vmap
    def call(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, table: Any) -> jax.Array:
        scales = lhs_scale.astype(jnp.float32), rhs_scale.astype(jnp.float32)
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

    # Pallas's pipeline divides an int32 by Python integers, which would be int64 under jax_enable_x64.
    with jax.named_scope(GROUPED_GEMM), jax.enable_x64(False):
        return call(*operands)


def _up(size: int, multiple: int = BLOCK) -> int:
    """Rounds a size up to a multiple of ``multiple``."""
    return -(-size // multiple) * multiple


def _filled(x: jax.Array, *sizes: int) -> jax.Array:
    """Pads an array with zeros at the end of each dimension, to these sizes."""
    if x.shape == sizes:
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, size - have, 0) for size, have in zip(sizes, x.shape)])
