"""Rows of experts in tiles: which tiles hold rows of which expert."""

from functools import partial

import jax
import numpy as np
import pytest

from fp8flax._core.gemm import ragged

ROWS, TILE = 384, 128

# Tiles that several share, an empty group, rows left over and rows beyond the last; none at all.
SIZES = [(100, 0, 90, 60), (0, 300, 0, 0), (0, 0, 0, 0), (0, 0, 0, 999), (129, 1, 127, 43), (384, 1, 0, 0)]
# Sums that no int32 holds, negative sizes.
LARGE = [(2**31 - 1, 5, 5, -3), (2**30, 2**30, 2**30, 2**30), (-5, 10, 100, 7)]


def bounds(rows, sizes):
    """First row of each group, and the row after its last one; of those left over last."""
    sizes = np.clip(np.asarray(sizes, np.int64), 0, None)
    ends = [*np.minimum(np.cumsum(sizes), rows).tolist(), rows]
    return list(zip([0, *ends[:-1]], ends))


visits_of = jax.jit(partial(ragged.visits_of, ROWS, TILE))


@pytest.mark.newest
@pytest.mark.parametrize("sizes", [*SIZES, *LARGE, (300,), tuple(range(200)), (0,) * 255 + (300,)])
def test_each_row_is_visited_by_its_expert(sizes):
    """Each expert visits the tiles of its rows, in the order of the rows; what is too many has no rows."""
    expected, first, number = [], [], []
    for expert, (start, end) in enumerate(bounds(ROWS, sizes)[:-1]):
        first.append(len(expected))
        for row in range(start // TILE * TILE, end if start < end else 0, TILE):
            expected.append((row, expert, max(start, row) - row, min(end, row + TILE) - row))
        number.append(len(expected) - first[-1])
    found = jax.tree.map(np.asarray, visits_of(np.array(sizes, np.int32)))
    assert list(zip(*(x[: len(expected)].tolist() for x in found[:4]))) == expected
    assert (found.first.tolist(), found.number.tolist()) == (first, number)
    assert len(found.row) == ROWS // TILE + len(sizes) - 1
    unused = slice(len(expected), None)
    assert not found.row[unused].any()
    assert not found.high[unused].any()
    assert (found.expert < len(sizes)).all()
