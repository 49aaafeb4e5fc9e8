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

from fp8flax._core.gemm.kernels.grouped_gemm_hopper import Tile, Tiling, grouped_gemm
from fp8flax._core.gemm.kernels.groups import (
    TILE,
    before,
    blocks_of_groups,
    group_of,
    num_tiles,
    table_of,
    transpose_groups,
)
from fp8flax._core.gemm.kernels.on_shards import ragged_on_shards
from fp8flax._core.gemm.request import ExpertProducts, ExpertSums
from fp8flax._core.names import GROUPED_GEMM
from fp8flax._core.qtensor import BLOCK, QTensor, View


def expert_products(
    request: ExpertProducts,
    lhs: QTensor,
    kernels: QTensor,
    group_sizes: jax.Array,
    *,
    on_shards: bool = False,
) -> jax.Array:
    """Multiplies each row by its expert's kernel, and returns the result without padding.

    With ``on_shards`` each of several devices computes a part. The operands are those of
    ``grouped_products``.
    """

    def of_part(lhs: QTensor, kernels: QTensor, group_sizes: jax.Array) -> jax.Array:
        if request.is_transposed and not kernels.quantizer.scales_along_contraction:
            kernels = jax.tree.map(transposed, kernels)
        return grouped_products(lhs, kernels, group_sizes, out_dtype=request.dtype)

    if on_shards:
        return _products_on_shards(request, of_part, lhs, kernels, group_sizes, name=GROUPED_GEMM)
    rows, columns = request.shape
    return of_part(lhs, kernels, group_sizes)[:rows, :columns]


def transposed(x: jax.Array) -> jax.Array:
    """Swaps rows and columns of each kernel of a stack; a scale per kernel is returned unchanged."""
    return jnp.swapaxes(x, 1, 2) if x.ndim == 3 else x


expert_products_on_shards = partial(expert_products, on_shards=True)


def expert_sums(
    request: ExpertSums, lhs: QTensor, rhs: QTensor, group_sizes: jax.Array, *, on_shards: bool = False
) -> jax.Array:
    """Sums the outer products of each expert's rows, and returns the result without padding.

    With ``on_shards`` each of several devices computes a part. The operands are those of
    ``grouped_sums``.
    """
    of_part: Callable[..., jax.Array] = partial(grouped_sums, out_dtype=request.dtype)
    if on_shards:
        return _sums_on_shards(request, of_part, lhs, rhs, group_sizes, name=GROUPED_GEMM)
    _, depth, columns = request.shape
    return of_part(lhs, rhs, group_sizes)[:, :depth, :columns]


expert_sums_on_shards = partial(expert_sums, on_shards=True)


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
        dims = "mk", "ekn" if request.is_transposed else "enk", "mn"
        return ragged_on_shards(of_part, dims, lhs, kernels, group_sizes, name=name)[:rows, :columns]
    # Devices exchange square blocks in the order of the kernel, as in ``gemm_on_shards``.
    view = View(kernels.codes.shape[2:], (1,), ())
    is_swapped = request.is_transposed and kernels.quantizer.serves(kernels.quantizer, view)

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

    return Tiling(rows, columns, num_tiles(rows, experts + 1), False, tile)


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
        first = before(table, 0, expert)
        return Tile(
            lhs_row=row,
            rhs_row=jnp.int32(0),
            block=first,
            num_blocks=table[0, expert] - first,
            out_row=expert * np.int32(depth) + row,
            low=jnp.int32(0),
            high=jnp.int32(TILE),
        )

    return Tiling(experts * depth, columns, experts * int(tiles), True, tile)


def grouped_products(
    lhs: QTensor, kernels: QTensor, group_sizes: jax.Array, *, out_dtype: Any, interpret: Any = None
) -> jax.Array:
    """Multiplies each row by its expert's kernel: ``(rows, columns)``, zeros for rows without expert.

    It pads the operands to whole tiles and calls ``grouped_gemm`` once. ``expert_products`` calls it, on
    one device, or on each of several devices for its part.

    Args:
        lhs: codes ``(rows, depth)``; with scales per block ``(1, rows, depth)``.
        kernels: codes ``(experts, columns, depth)``; with scales per block
            ``(experts, 1, columns, depth)``.
        group_sizes: number of rows of each expert, ``(experts,)``.
        out_dtype: dtype of the result.
        interpret: see ``grouped_gemm``.
    """
    (rows, depth), columns, experts = lhs.codes.shape[-2:], kernels.codes.shape[-2], group_sizes.size
    filled_rows, filled_depth, filled_columns = max(_up(rows, 8), TILE), _up(depth), _up(columns)
    left = _filled(lhs.codes.reshape(rows, depth), filled_rows, filled_depth)
    right = kernels.codes.reshape(experts, columns, depth)
    right = _filled(right, experts, filled_columns, filled_depth).reshape(-1, filled_depth)
    if lhs.quantizer.scales_along_contraction:
        lhs_scale = _filled(_block_scales(lhs, 1), depth // BLOCK, filled_rows)
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

    It puts the rows of each expert into whole tiles and calls the GPU kernel ``grouped_gemm`` once.
    ``expert_sums`` calls it, on one device, or on each of several devices for its part.

    Args:
        lhs: codes ``(rows, depth)``; with scales per block ``(1, depth, rows)``.
        rhs: codes ``(rows, columns)``; with scales per block ``(1, columns, rows)``.
        group_sizes: number of rows of each expert, ``(experts,)``.
        out_dtype: dtype of the result.
        interpret: see ``grouped_gemm``.
    """
    is_per_block, experts = lhs.quantizer.scales_along_contraction, group_sizes.size
    depth, columns = (x.codes.shape[1] for x in (lhs, rhs))
    rows = lhs.codes.shape[2] if is_per_block else max(_up(lhs.codes.shape[0], 8), TILE)
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
    """Calls ``grouped_gemm``; under ``jax.vmap`` in a loop, once for each element of the batch."""

    @sequential_vmap
    def call(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, table: Any) -> jax.Array:
        scales = lhs_scale.astype(jnp.float32), rhs_scale.astype(jnp.float32)
        options = {"tiling": tiling, "out_dtype": out_dtype, "interpret": interpret}
        return grouped_gemm(lhs, rhs, *scales, table, **options)

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
