"""Splits rows that belong to groups into tiles of a fixed size, and copies the tiles side by side.

The groups of a ragged dot are the rows of each expert; one more group, the last, has the rows that belong
to no expert. Group g owns the rows from ``ends[g - 1]`` up to, but without, ``ends[g]``. Each tile has
``TILE`` rows and serves one group. The index of its first row is a multiple of ``align``, so a tile may
also cover rows of other groups. Tiles are numbered group by group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.axes import shape_varying_as, vary_alike
from fp8flax._core.names import TRANSPOSE_GROUPS
from fp8flax._core.qtensor import TILE

ALIGN = 8
"""The first row of a tile is a multiple of this. Shared memory stores codes and results in units of 8 rows,
and Hopper copies them in these units. A copy that begins within a unit would lose rows. (The interpreter
does not show this.)"""

# The rows of the table that ``table_of`` returns.
TILES_UP_TO, ENDS = 0, 1


class Group(NamedTuple):
    """The group that a tile serves, and the tile's rows, as int32 scalars.

    The number of tiles is an upper bound, so some of the last tiles may be unused.
    """

    index: Any
    """The index of the group; the number of groups if the tile is unused."""
    row: Any
    """The first row of the tile; 0 if the tile is unused."""
    low: Any
    """The first row of the group in the tile, relative to ``row``; 0 if the tile is unused."""
    high: Any
    """One more than the last row of the group in the tile, relative to ``row``; 0 if the tile is unused."""


def table_of(rows: int, group_sizes: jax.Array, align: int = ALIGN) -> jax.Array:
    """Returns the table of all groups, int32 of shape ``(2, groups)``, from which kernels find their tiles.

    The first row has the number of tiles up to the end of each group. The second row has ``ends``, the end
    of each group. The rows that belong to no expert are the last group.

    Args:
        rows: total number of rows.
        group_sizes: number of rows of each group but the last, ``(groups - 1,)``, integers. A negative size
            counts as 0.
        align: the first row of each tile is a multiple of this, ``TILE`` or less.
    """
    ends = lax.pad(ends_of_groups(group_sizes, rows), np.int32(rows), [(0, 1, 0)])
    starts = lax.pad(ends, np.int32(0), [(1, -1, 0)])
    counts = (ends - _down(starts, align) + np.int32(TILE - 1)) // np.int32(TILE)
    counts = jnp.where(ends > starts, counts, 0)
    return jnp.stack([_sums_up_to(counts), ends])


def ends_of_groups(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Returns the end of each group, int32 of the shape of ``group_sizes``: the row after its last row.

    A size below 0 counts as 0. An end is at most ``rows``.
    """
    clipped = jnp.clip(group_sizes, 0, min(rows, jnp.iinfo(group_sizes.dtype).max)).astype(jnp.int32)
    return lax.min(_sums_up_to(clipped), np.int32(rows))


def _sums_up_to(numbers: jax.Array) -> jax.Array:
    """Returns for each number the sum of the numbers up to and with it, int32."""
    # Masked sums instead of cumsum, because XLA fuses them into one kernel.
    shape = numbers.size, numbers.size
    is_up_to = lax.broadcasted_iota(np.int32, shape, 0) >= lax.broadcasted_iota(np.int32, shape, 1)
    return jnp.sum(jnp.where(is_up_to, numbers, 0), axis=1, dtype=jnp.int32)


def _down(row: Any, align: int) -> Any:
    """Rounds a row index down to a multiple of ``align``, where a tile may begin."""
    return lax.div(row, np.int32(align)) * np.int32(align)


def num_tiles(rows: int, groups: int) -> int:
    """Returns an upper bound of the number of tiles of ``rows`` rows in ``groups`` groups."""
    # The first tile of a group may begin ``ALIGN - 1`` rows early, and the last one end ``TILE - 1`` late.
    return max(1, (rows + groups * (TILE - 1 + ALIGN - 1)) // TILE)


def before(table: Any, row: int, group: Any) -> Any:
    """Returns ``table[row, group - 1]``, or 0 for the first group; kernels call it."""
    return lax.select(group > 0, table[row, lax.max(group - 1, np.int32(0))], np.int32(0))


def group_of(table: Any, tile: Any, groups: int, align: int = ALIGN) -> Group:
    """Returns the group that a tile serves, found by bisection; kernels call it.

    Args:
        table: the result of ``table_of``, or a reference to it.
        tile: the index of the tile.
        groups: number of groups.
        align: the ``align`` that ``table_of`` was called with.
    """
    last = np.int32(groups - 1)
    index, step = jnp.int32(0), 1 << (groups.bit_length() - 1)
    while step:
        next_index = index + np.int32(step)
        ends_before = table[TILES_UP_TO, lax.min(next_index - 1, last)] <= tile
        index = lax.select((next_index <= groups) & ends_before, next_index, index)
        step //= 2
    is_used = index < groups
    start, end = before(table, ENDS, index), table[ENDS, lax.min(index, last)]
    row = _down(start, align) + (tile - before(table, TILES_UP_TO, index)) * np.int32(TILE)
    low, high = lax.max(start, row) - row, lax.min(end, row + np.int32(TILE)) - row
    zero = jnp.int32(0)
    return Group(index, *(lax.select(is_used, x, zero) for x in (row, low, high)))


def transpose_groups(codes: jax.Array, table: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Transposes the tiles of all groups and returns them side by side: ``(columns, tiles * TILE)``.

    The gradient of an expert's kernel sums over the rows of the expert. Hopper's FP8 units sum over the
    last axis, so the rows become columns. Rows of a tile that belong to another group become zero, and so
    do all rows of unused tiles. The sum of an expert can then run over whole tiles.

    Args:
        codes: ``(rows, columns)``, of one byte each; the number of columns is a multiple of 128.
        table: the result of ``table_of``.
        interpret: whether to run the kernel step by step on any device, for tests.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (rows, columns), groups = codes.shape, table.shape[1]
    tiles = num_tiles(rows, groups)

    def kernel(codes_ref: Any, table_ref: Any, out_ref: Any) -> None:
        group = group_of(table_ref, pl.program_id(0), groups)
        index = lax.broadcasted_iota(np.int32, (TILE, TILE), 0)
        source = codes_ref.at[pl.ds(group.row, TILE), :]
        taken = triton.load(source, mask=(index >= group.low) & (index < group.high), other=0)
        out_ref[...] = taken.T

    bits, table = vary_alike(lax.bitcast_convert_type(codes, jnp.uint8), table)
    if interpret:  # the interpreter shifts a tile that reaches beyond the last row
        bits = lax.pad(bits, np.uint8(0), ((0, TILE, 0), (0, 0, 0)))
    params = {} if interpret else {"compiler_params": triton.CompilerParams(num_warps=8, num_stages=1)}
    out = pl.pallas_call(
        kernel,
        out_shape=shape_varying_as(bits, (columns, tiles * TILE), jnp.uint8),
        grid=(tiles, columns // TILE),
        in_specs=[
            pl.BlockSpec((bits.shape[0], TILE), lambda t, j: (0, j)),
            pl.BlockSpec(table.shape, lambda t, j: (0, 0)),
        ],
        out_specs=pl.BlockSpec((TILE, TILE), lambda t, j: (j, t)),
        name=TRANSPOSE_GROUPS,
        interpret=interpret,
        **params,
    )(bits, table)
    return lax.bitcast_convert_type(out, codes.dtype)


def blocks_of_groups(codes: jax.Array, scale: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the blocks of all experts side by side, and their scales.

    It is the counterpart of ``transpose_groups`` for scales per block. The codes are transposed already, so
    a block has ``TILE`` columns. A block that several experts share is copied once for each of them, with
    zeros in the columns of the others. The sum of an expert can then run over whole blocks. Blocks of the
    last group, the rows without expert, may follow or be cut off; no sum of an expert reads them.

    Args:
        codes: ``(columns, rows)``, of one byte each; the number of rows is a multiple of ``TILE``.
        scale: the scales of each block, ``(rows / TILE, columns)``.
        table: the result of ``table_of`` with ``align=TILE``.

    Returns:
        Codes ``(columns, blocks * TILE)`` and scales ``(blocks, columns)``.
    """
    (columns, rows), groups = codes.shape, table.shape[1]
    # Each expert shares at most one block with the expert before it.
    index = lax.iota(np.int32, rows // TILE + groups - 2)
    group = jax.vmap(lambda tile: group_of(table, tile, groups, TILE))(index)
    block = lax.div(group.row, np.int32(TILE))
    row = lax.broadcasted_iota(np.int32, (index.size, TILE), 1)
    is_mine = (row >= group.low[:, None]) & (row < group.high[:, None])
    # Codes are copied as 32-bit words: XLA's kernel moves four elements at once, whether bytes or words.
    mask = jnp.where(is_mine, np.uint8(255), np.uint8(0)).reshape(index.size, TILE // 4, 4)
    words = lax.bitcast_convert_type(codes.reshape(columns, rows // TILE, TILE // 4, 4), jnp.uint32)
    mask = lax.bitcast_convert_type(mask, jnp.uint32)
    words = jnp.take(words, block, axis=1, mode="clip") & mask[None]
    taken = lax.bitcast_convert_type(words, codes.dtype).reshape(columns, index.size * TILE)
    return taken, jnp.take(scale, block, axis=0, mode="clip")
