"""Rows of groups in tiles: where the tiles lie, and copies of them side by side."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.gemm.kernels import groups

E4M3 = jnp.float8_e4m3fn


ROWS = 300


# Tiles that several share, an empty group, rows left over and rows beyond the last; none at all.
SIZES = [(100, 0, 90, 60), (0, 300, 0, 0), (0, 0, 0, 0), (0, 0, 0, 999), (129, 1, 127, 43), (300, 1, 0, 0)]


def bounds(rows, sizes):
    """First row of each group, and the row after its last one; of those left over last."""
    ends = [*np.minimum(np.cumsum(sizes), rows), rows]
    return list(zip([0, *ends[:-1]], ends))


def tiles(rows, sizes):
    """Returns for each tile its group, its first row, and the first and last of its rows in the group."""
    return [
        (g, row, max(start, row) - row, min(end, row + groups.TILE) - row)
        for g, (start, end) in enumerate(bounds(rows, sizes))
        if end > start
        for row in range(start // 8 * 8, end, groups.TILE)
    ]


@jax.jit
def all_groups(sizes):
    """Returns the group of each tile, up to the largest possible number of tiles."""
    count = sizes.size + 1
    table = groups.table_of(ROWS, sizes)
    index = jnp.arange(groups.num_tiles(ROWS, count), dtype=jnp.int32)
    return jax.vmap(partial(groups.group_of, table, groups=count))(index)


@pytest.mark.parametrize("sizes", [*SIZES, (300,), tuple(range(200)), (0,) * 255 + (300,)])
def test_where_tiles_lie(sizes):
    """Each row once; what is too many has none."""
    count, found = len(sizes) + 1, all_groups(np.array(sizes))
    expected = tiles(ROWS, sizes)
    assert list(zip(*(x[: len(expected)].tolist() for x in found))) == expected
    assert len(expected) <= found.high.size
    assert not any(found.high[len(expected) :])
    assert all(g == count for g in found.index[len(expected) :])


@jax.jit
def transposed(codes, sizes):
    return groups.transpose_groups(codes, groups.table_of(ROWS, sizes), interpret=True)


@pytest.mark.newest
@pytest.mark.parametrize("sizes", SIZES[:4])
def test_transposed_groups(sizes):
    codes = np.random.default_rng(0).integers(0, 256, (ROWS, 256), np.uint8)
    out = transposed(codes.view(E4M3), np.array(sizes))
    expected = np.zeros((groups.num_tiles(ROWS, len(sizes) + 1), groups.TILE, 256), np.uint8)
    for i, (_, row, low, high) in enumerate(tiles(ROWS, sizes)):
        expected[i, low:high] = codes[row + low : row + high]
    np.testing.assert_array_equal(np.asarray(out).view(np.uint8), expected.reshape(-1, 256).T)


@jax.jit
def blocks(codes, scale, sizes):
    return groups.blocks_of_groups(codes, scale, groups.table_of(384, sizes, groups.TILE))


@pytest.mark.parametrize("sizes", SIZES[:4])
def test_blocks_of_groups(sizes):
    """Blocks are where the rows are, with their scales. Rows of other groups become zeros."""
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(0, 256, (40, 384), np.uint8), rng.random((3, 40), np.float32)
    found, scales = blocks(codes.view(E4M3), scale, np.array(sizes))
    spans = bounds(384, sizes)[:-1]
    expected = [
        (b, span) for span in spans if span[0] < span[1] for b in range(span[0] // 128, -(-span[1] // 128))
    ]
    assert len(expected) <= len(scales) == 3 + len(sizes) - 1
    for i, (b, (start, end)) in enumerate(expected):
        mine = np.where((start <= np.arange(384)) & (np.arange(384) < end), codes, 0)
        block = np.asarray(found[:, i * 128 : (i + 1) * 128]).view(np.uint8)
        np.testing.assert_array_equal(block, mine[:, b * 128 : (b + 1) * 128])
        np.testing.assert_array_equal(scales[i], scale[b])


def test_few_products_are_in_vain():
    """The rows of all tiles are at most a tenth more than those of a random router."""
    table_of = jax.jit(partial(groups.table_of, 8192))
    for seed in range(20):
        shares = np.random.default_rng(seed).dirichlet([2] * 8)
        table = table_of(np.random.default_rng(seed).multinomial(8192, shares))
        assert groups.TILE * int(table[0, -1]) <= 1.1 * 8192
