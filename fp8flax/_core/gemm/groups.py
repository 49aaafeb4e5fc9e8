"""Cuts the rows of experts into tiles: which tiles hold rows of which expert.

Expert e of a ragged dot owns the rows from ``ends[e - 1]`` up to, but without, ``ends[e]``. Tiles are cut
at multiples of their size, so a tile may hold rows of several experts. Each of them visits the tile once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Visits(NamedTuple):
    """The visits of all experts to the tiles of their rows, in the order of the rows: int32 arrays.

    The number of visits is an upper bound. The last visits may be unused; they have no rows.
    """

    row: jax.Array
    """For each visit, the first row of its tile; 0 if the visit is unused."""
    expert: jax.Array
    """For each visit, the index of its expert."""
    low: jax.Array
    """For each visit, the first row of the expert in the tile, counted from the start of the tile."""
    high: jax.Array
    """For each visit, the row after the expert's last row in the tile; 0 if the visit is unused."""
    first: jax.Array
    """For each expert, the index of its first visit."""
    number: jax.Array
    """For each expert, the number of its visits."""


def visits_of(rows: int, tile: int, group_sizes: jax.Array) -> Visits:
    """Returns the visits of all experts to tiles of ``tile`` rows; ``rows`` is a multiple of ``tile``."""
    experts, size = group_sizes.size, np.int32(tile)
    ends = ends_of_groups(group_sizes, rows)
    starts = lax.pad(ends, np.int32(0), [(1, -1, 0)])
    number = jnp.where(ends > starts, (ends - 1) // size - starts // size + 1, 0)
    after = _sums_up_to(number)
    first = after - number
    visit = lax.iota(np.int32, rows // tile + experts - 1)
    is_used = visit < after[-1]
    expert = jnp.sum(visit[:, None] >= after[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, np.int32(experts - 1))
    row = jnp.where(is_used, (starts[expert] // size + visit - first[expert]) * size, 0)
    low = jnp.maximum(starts[expert] - row, 0)
    high = jnp.where(is_used, jnp.minimum(ends[expert] - row, size), 0)
    return Visits(row, expert, low, high, first, number)


def is_of_expert(tile: int, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns masks ``(..., tile, 1)`` of the rows of visits that belong to the expert of the visit."""
    row = lax.broadcasted_iota(np.int32, (*low.shape, tile, 1), low.ndim)
    low, high = (x[..., None, None] for x in (low, high))
    return (row >= low) & (row < high)


def ends_of_groups(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Returns the end of each group, int32 of the shape of ``group_sizes``: the row after its last row.

    A size below 0 numbers as 0. An end is at most ``rows``.
    """
    clipped = jnp.clip(group_sizes, 0, min(rows, jnp.iinfo(group_sizes.dtype).max)).astype(jnp.int32)
    return lax.min(_sums_up_to(clipped), np.int32(rows))


def _sums_up_to(numbers: jax.Array) -> jax.Array:
    """Returns for each number the sum of the numbers up to and with it, int32."""
    # Masked sums instead of cumsum, because XLA fuses them into one kernel.
    shape = numbers.size, numbers.size
    is_up_to = lax.broadcasted_iota(np.int32, shape, 0) >= lax.broadcasted_iota(np.int32, shape, 1)
    return jnp.sum(jnp.where(is_up_to, numbers, 0), axis=1, dtype=jnp.int32)
