"""Rows in groups, in tiles of one group each: where those lie, and what lays them side by side.

Group g owns the rows up to ``ends[g]`` from where the group before it ends. Tiles have a fixed number of
rows, the first of which is a multiple of 8, or of as many, and are counted group by group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._compat.varying import shape_varying_as
from fp8flax._core.axes import vary_alike
from fp8flax._core.names import TRANSPOSE_GROUPS

TILE = 128
"""Rows of a tile."""

# Shared memory holds codes, and what is written, in tiles of 8 rows, and so does the map by which Hopper
# copies them: a copy that began within one would lose rows. (No interpreter shows it.)
_ALIGN = 8


class Group(NamedTuple):
    """The group of a tile, as int32 scalars."""

    index: Any
    """Which it is; the number of groups for a tile that is one too many."""
    row: Any
    """The first row of the tile."""
    low: Any
    """The first of the tile's rows, counted from there, that belongs to the group."""
    high: Any
    """The row after the last one; 0, as ``low``, in a tile that is too many."""


def table_of(rows: int, group_sizes: jax.Array, align: int = _ALIGN) -> jax.Array:
    """Returns how many tiles there are up to the end of each group, and its ``ends``: ``(2, groups)``.

    Rows that belong to no group are one more, the last.

    Args:
        rows: how many there are.
        group_sizes: of each group, ``(groups - 1,)``, integers; what is negative counts as 0.
        align: of what a tile's first row is a multiple, ``TILE`` or less.
    """
    # Sums under a mask, not cumsum: XLA makes one kernel of all this.
    experts = group_sizes.size
    precedes = lax.broadcasted_iota(np.int32, (experts + 1, experts), 0) >= lax.broadcasted_iota(
        np.int32, (experts + 1, experts), 1
    )
    sizes = bounded(group_sizes, rows)
    sums = jnp.sum(jnp.where(precedes, sizes, 0), axis=1, dtype=jnp.int32)
    is_last = lax.iota(np.int32, experts + 1) == experts
    ends = jnp.where(is_last, np.int32(rows), lax.min(sums, np.int32(rows)))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    counts = (ends - _down(starts, align) + np.int32(TILE - 1)) // np.int32(TILE)
    counts = jnp.where(ends > starts, counts, 0)
    up_to = lax.broadcasted_iota(np.int32, (experts + 1, experts + 1), 0) >= lax.broadcasted_iota(
        np.int32, (experts + 1, experts + 1), 1
    )
    tiles = jnp.sum(jnp.where(up_to, counts, 0), axis=1, dtype=jnp.int32)
    return jnp.stack([tiles, ends])


def bounded(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Returns sizes as int32, none of them negative, nor so large that their sum would not fit."""
    return jnp.clip(group_sizes, 0, min(rows, jnp.iinfo(group_sizes.dtype).max)).astype(jnp.int32)


def _down(row: Any, align: int) -> Any:
    """Returns it, or the row before it where a tile may begin."""
    return lax.div(row, np.int32(align)) * np.int32(align)


def num_tiles(rows: int, groups: int) -> int:
    """Returns how many tiles there can be at most, of rows in so many groups."""
    return max(1, (rows + groups * (TILE - 1 + _ALIGN - 1)) // TILE)


def before(table: Any, row: int, group: Any) -> Any:
    """Returns ``table[row]`` of the group before, zero for the first; a kernel calls it."""
    return lax.select(group > 0, table[row, lax.max(group - 1, np.int32(0))], np.int32(0))


def group_of(table: Any, tile: Any, groups: int, align: int = _ALIGN) -> Group:
    """Returns the group of a tile, by bisection; a kernel calls it."""
    last = np.int32(groups - 1)
    index, step = jnp.int32(0), 1 << (groups.bit_length() - 1)
    while step:
        next_index = index + np.int32(step)
        ends_before = table[0, lax.min(next_index - 1, last)] <= tile
        index = lax.select((next_index <= groups) & ends_before, next_index, index)
        step //= 2
    is_used = index < groups
    start, end = before(table, 1, index), table[1, lax.min(index, last)]
    row = _down(start, align) + (tile - before(table, 0, index)) * np.int32(TILE)
    low, high = lax.max(start, row) - row, lax.min(end, row + np.int32(TILE)) - row
    zero = jnp.int32(0)
    return Group(index, *(lax.select(is_used, x, zero) for x in (row, low, high)))


def transpose_groups(codes: jax.Array, table: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns the tiles of all groups side by side, transposed: ``(columns, tiles * TILE)``.

    The first and the last tile of a group are filled up with zeros, and so are the tiles that are too many.

    Args:
        codes: ``(rows, columns)``, of one byte each; columns are a multiple of 128.
        table: of ``table_of``.
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
    if interpret:  # which would move a tile that begins where there are fewer rows than it has
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
    """Returns the blocks of all groups but the last side by side: ``(columns, blocks * TILE)``, and scales.

    A block that several groups share is there once for each, with zeros for the rows of the others.

    Args:
        codes: ``(columns, rows)``, of one byte each; rows are a multiple of ``TILE``.
        scale: of each block, ``(rows / TILE, columns)``.
        table: of ``table_of``, with tiles that begin at multiples of ``TILE``.
    """
    (columns, rows), groups = codes.shape, table.shape[1]
    index = lax.iota(np.int32, rows // TILE + groups - 2)
    of = jax.vmap(lambda tile: group_of(table, tile, groups, TILE))(index)
    block = lax.div(of.row, np.int32(TILE))
    row = lax.broadcasted_iota(np.int32, (index.size, TILE), 1)
    is_mine = (row >= of.low[:, None]) & (row < of.high[:, None])
    # In words, of which XLA's kernel reads and writes four at once, as it does of bytes.
    mask = jnp.where(is_mine, np.uint8(255), np.uint8(0)).reshape(index.size, TILE // 4, 4)
    words = lax.bitcast_convert_type(codes.reshape(columns, rows // TILE, TILE // 4, 4), jnp.uint32)
    mask = lax.bitcast_convert_type(mask, jnp.uint32)
    words = jnp.take(words, block, axis=1, mode="clip") & mask[None]
    taken = lax.bitcast_convert_type(words, codes.dtype).reshape(columns, index.size * TILE)
    return taken, jnp.take(scale, block, axis=0, mode="clip")
