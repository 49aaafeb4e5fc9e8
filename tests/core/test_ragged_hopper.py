"""The kernels of a ragged dot on Hopper, interpreted step by step, beside NumPy; and what they multiply."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.gemm import cuda_ragged
from fp8flax._core.gemm.cuda_ragged import groups_by_kernel, rows_by_kernel
from fp8flax._core.gemm.gpus import compile_target
from fp8flax._core.gemm.kernels import grouped_gemm_hopper, groups
from fp8flax._core.gemm.kernels.block_gemm_hopper import HAS_MOSAIC
from fp8flax._core.plans.contraction import States
from fp8flax._core.plans.ragged_dot import fp8_ragged_dot
from fp8flax._core.qtensor import QTensor, View
from tests.cases import error_of_product, with_reference

E4M3 = jnp.float8_e4m3fn
ROWS = 300
# Tiles that several share, an empty group, rows left over and rows beyond the last; none at all.
SIZES = [(100, 0, 90, 60), (0, 300, 0, 0), (0, 0, 0, 0), (0, 0, 0, 999), (129, 1, 127, 43), (300, 1, 0, 0)]
needs_mosaic = pytest.mark.skipif(
    not HAS_MOSAIC, reason="Mosaic GPU of JAX 0.9 lacks what the kernel is written in"
)


def bounds(rows, sizes):
    """First row of each group, and the row after its last one; of those left over last."""
    ends = [*np.minimum(np.cumsum(sizes), rows), rows]
    return list(zip([0, *ends[:-1]], ends))


def tiles(rows, sizes):
    """Of each tile its group, first row, and the first and last of its rows that are the group's."""
    return [
        (g, row, max(start, row) - row, min(end, row + groups.TILE) - row)
        for g, (start, end) in enumerate(bounds(rows, sizes))
        if end > start
        for row in range(start // 8 * 8, end, groups.TILE)
    ]


@jax.jit
def all_groups(sizes):
    """Of each tile that there can be."""
    count = sizes.size + 1
    table = groups.table_of(ROWS, sizes)
    index = jnp.arange(groups.num_tiles(ROWS, count), dtype=jnp.int32)
    return jax.vmap(partial(groups.group_of, table, groups=count))(index)


@pytest.mark.oldest
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


@pytest.mark.oldest
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


@pytest.mark.oldest
@pytest.mark.parametrize("sizes", SIZES[:4])
def test_blocks_of_groups(sizes):
    """Where they are for all rows, with their scales; zeros for the rows of others, whatever those hold."""
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


@pytest.mark.parametrize(
    "sizes",
    [*SIZES, (2**31 - 1, 5, 5, -3), (2**30, 2**30, 2**30, 2**30), (-5, 10, 100, 7), (37, 38, 39, 40)],
)
def test_copies_begin_where_hopper_can(sizes):
    """At multiples of 8 rows, and each row of the result is written once: of its own group, or zero."""
    rows = 304  # a multiple of 8
    tiling = cuda_ragged._tiling_of_rows(rows, 256, 128, len(sizes))
    table = groups.table_of(rows, jnp.array(sizes))
    found = jax.vmap(partial(tiling.tile, table))(jnp.arange(tiling.num_tiles, dtype=jnp.int32))
    owner = np.repeat(np.arange(len(sizes) + 1), np.diff(bounds(rows, np.clip(sizes, 0, rows)))[:, 0])
    written = np.zeros(rows, int)
    for lhs_row, rhs_row, block, num_blocks, out_row, low, high in zip(*(np.asarray(x) for x in found)):
        assert lhs_row % 8 == rhs_row % 8 == 0
        assert 0 <= lhs_row == out_row <= rows - groups.TILE
        assert 0 <= low <= high <= groups.TILE
        mine = slice(out_row + low, out_row + high)
        written[mine] += 1
        assert block == 0
        assert num_blocks in (0, 2)
        assert (owner[mine] == (rhs_row // 128 if num_blocks else len(sizes))).all()
    assert (written == 1).all()


@pytest.mark.parametrize("align", [8, groups.TILE])
def test_sums_are_of_each_groups_own_tiles(align):
    """Over what lies side by side; each row of the result is written once."""
    depth, sizes = 256, SIZES[0]
    tiling = cuda_ragged._tiling_of_groups(depth, 128, len(sizes))
    table = groups.table_of(384, np.array(sizes), align)
    found = jax.vmap(partial(tiling.tile, table))(jnp.arange(tiling.num_tiles, dtype=jnp.int32))
    assert found.out_row.tolist() == list(range(0, len(sizes) * depth, groups.TILE))
    assert (found.lhs_row == found.out_row % depth).all()
    assert not found.rhs_row.any()
    assert not found.low.any()
    assert (found.high == groups.TILE).all()
    first = 0
    for e, (start, end) in enumerate(bounds(384, sizes)[:-1]):
        count = -(-(end - start // align * align) // groups.TILE) if start < end else 0
        assert found.block[2 * e : 2 * e + 2].tolist() == [first] * 2
        assert found.num_blocks[2 * e : 2 * e + 2].tolist() == [count] * 2
        first += count


of_8192_rows = jax.jit(partial(groups.table_of, 8192))


def test_few_products_are_in_vain():
    """Of whole tiles, of what a router at random gives: at most a tenth more than are needed."""
    for seed in range(20):
        sizes = np.random.default_rng(seed).multinomial(
            8192, np.random.default_rng(seed).dirichlet([2] * 8)
        )
        table = groups.table_of(8192, jnp.array(sizes))
        assert groups.TILE * int(table[0, -1]) <= 1.1 * 8192


@pytest.fixture
def _one_core(monkeypatch):
    """The interpreter compiles the kernel anew for each core that there is. One does all tiles, in turn."""
    monkeypatch.setattr(grouped_gemm_hopper, "_CORES", 1)


def interpreted(f, out_dtype):
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return jax.jit(partial(f, out_dtype=out_dtype, interpret=InterpretGPUParams()))


def quantized(rng, shape, scale_shape):
    quantizer = fp8.CurrentQuantizer(dtype=E4M3)
    scale = 2.0 ** rng.uniform(-3, 3, scale_shape)
    return QTensor(jnp.asarray(rng.normal(size=shape), E4M3), jnp.asarray(scale, jnp.float32), quantizer)


def wide(x):
    scale = np.asarray(x.scale, np.float64)
    return np.asarray(x.codes, np.float64) * scale.reshape(*scale.shape, *[1] * (x.codes.ndim - scale.ndim))


@pytest.mark.long
@needs_mosaic
@pytest.mark.usefixtures("_one_core")
@pytest.mark.parametrize(
    ("rows", "sizes", "depth", "columns", "is_fine", "out_dtype"),
    [
        (144, (13, 0, 100), 136, 40, True, jnp.bfloat16),
        (3, (1, 1), 16, 8, False, jnp.float32),
    ],
)
def test_ragged_dots_on_hopper(rows, sizes, depth, columns, is_fine, out_dtype):
    """Rows and sums of outer products; sizes that no tile divides; no NaN leaves its row or its group."""
    rng, experts = np.random.default_rng(0), len(sizes)
    spans = bounds(rows, sizes)
    of_rows, of_columns = ((rows, 1), (1, depth)) if is_fine else ((), ())
    lhs = quantized(rng, (rows, depth), of_rows)
    kernels = quantized(rng, (experts, columns, depth), (experts, columns, 1) if is_fine else (experts,))
    poisoned = spans[1][0] if sizes[1] else spans[2][0]  # one with a neighbour of another group in its tile
    lhs = QTensor(lhs.codes.at[poisoned, 5].set(jnp.nan), lhs.scale, lhs.quantizer)
    out = interpreted(rows_by_kernel, out_dtype)(lhs, kernels, np.array(sizes))
    assert (out.shape, out.dtype) == ((rows, columns), out_dtype)
    assert np.isnan(out).any(1).nonzero()[0].tolist() == [poisoned]
    tolerance = 2e-6 if out_dtype == jnp.float32 else 2**-8
    left, right, out = wide(lhs), wide(kernels), np.asarray(out, np.float64)
    for e, (start, end) in enumerate(spans[:-1]):
        kept = [row for row in range(start, end) if row != poisoned]
        if kept:
            assert error_of_product(out[kept], left[kept] @ right[e].T, left[kept], right[e].T) <= tolerance
    assert not out[slice(*spans[-1])].any()

    lhs = QTensor(lhs.codes, jnp.ones(of_columns) * lhs.scale[:1] if is_fine else lhs.scale, lhs.quantizer)
    g = quantized(rng, (rows, columns), (1, columns) if is_fine else ())
    out = interpreted(groups_by_kernel, out_dtype)(lhs, g, np.array(sizes))
    assert (out.shape, out.dtype) == ((experts, depth, columns), out_dtype)
    left, right, out = wide(lhs), wide(g), np.asarray(out, np.float64)
    for e, (start, end) in enumerate(spans[:-1]):
        factors = left[start:end].T, right[start:end]
        if start <= poisoned < end:
            assert np.isnan(out[e]).any(1).nonzero()[0].tolist() == [5]
        elif end > start:
            assert error_of_product(out[e], factors[0] @ factors[1], *factors) <= tolerance
        else:
            assert not out[e].any()


@pytest.mark.long
@needs_mosaic
@pytest.mark.usefixtures("_one_core")
@pytest.mark.parametrize(
    ("use_f32_scales", "is_square", "out_dtype"),
    [(False, True, jnp.bfloat16), pytest.param(True, False, jnp.float32, marks=pytest.mark.all_cells)],
)
def test_ragged_dots_of_blocks_on_hopper(use_f32_scales, is_square, out_dtype):
    """Blocks that two groups share, an empty one, rows left over; beside NumPy, by expert."""
    rng, rows, sizes, depth, columns = np.random.default_rng(0), 140, (13, 0, 120), 136, 40
    recipe = fp8.Float8BlockScaling(use_f32_scales=use_f32_scales).gemms
    of_rows, of_kernel = recipe.forward.lhs, recipe.forward.rhs if is_square else recipe.forward.lhs
    spans, tolerance = bounds(rows, sizes), 2e-6 if out_dtype == jnp.float32 else 2**-8
    x, w, g = (rng.normal(size=shape) for shape in ((rows, depth), (3, depth, columns), (rows, columns)))
    # Each block with a scale of its own.
    x *= np.exp(2 * rng.normal(size=(rows, 1)))
    x[:, 128:], w[:, 128:], g[128:] = 8 * x[:, 128:], w[:, 128:] / 64, 128 * g[128:]
    w *= 2.0 ** np.arange(3)[:, None, None]
    x, w, g = (np.asarray(a, np.float32) for a in (x, w, g))
    x[13, 5] = np.nan  # in a tile and a block with rows of another group
    x[133:] = g[133:] = 0

    def multiplied(f, *operands):
        qs = []
        for quantizer, a, axis in operands:
            quantize = partial(quantizer.quantize, view=View(a.shape[-2:], (axis,), ()))
            qs.append((jax.vmap(quantize) if a.ndim == 3 else quantize)(jnp.asarray(a)))
        return np.asarray(interpreted(f, out_dtype)(*qs, np.array(sizes)), np.float64)

    out = multiplied(rows_by_kernel, (of_rows, x, 1), (of_kernel, w, 0))[:, :columns]
    assert np.isnan(out).any(1).nonzero()[0].tolist() == [13]
    left = with_reference(of_rows, x, 1)
    for e, (start, end) in enumerate(spans[:-1]):
        kernel, mine = with_reference(of_kernel, w[e], 0), slice(start + (e == 2), end)
        if start < end:
            assert error_of_product(out[mine], left[mine] @ kernel, left[mine], kernel) <= tolerance
    assert not out[slice(*spans[-1])].any()

    x = x[:, :40]
    dw = multiplied(groups_by_kernel, (of_rows, x, 0), (of_rows, g, 0))
    left, right = (with_reference(of_rows, a, 0) for a in (x, g))
    assert np.argwhere(np.isnan(dw).any(2)).tolist() == [[2, 5]]
    dw[:, 5] = left[:, 5] = 0
    for e, (start, end) in enumerate(spans[:-1]):
        factors = left[start:end].T, right[start:end]
        if start < end:
            assert error_of_product(dw[e], factors[0] @ factors[1], *factors) <= tolerance
    assert not dw[1].any()


@needs_mosaic
@pytest.mark.parametrize(
    "way",
    [
        "plain",
        "blocks",
        pytest.param("vmap", marks=pytest.mark.long),
        pytest.param("remat", marks=pytest.mark.all_cells),
    ],
)
def test_which_gpus_have_the_kernel(way):
    """Hopper, of operands of one dtype; under transformations too. For one GPU, and for several."""
    blocks = way == "blocks"
    recipe = fp8.Float8BlockScaling() if blocks else fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3)
    f = partial(fp8_ragged_dot, states=States(), recipe=recipe)
    f = {"vmap": jax.vmap(f), "remat": jax.checkpoint(f)}.get(way, f)
    x, w, sizes = jnp.zeros((64, 32)), jnp.zeros((2, 32, 16)), jnp.array([10, 20])
    if way == "vmap":
        x, w, sizes = (jnp.stack([a] * 2) for a in (x, w, sizes))

    def step(x, w):
        out, vjp = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
        return out, vjp(out)

    for capability, count in ((None, 0), (8.9, 0), (9.0, 3), (10.0, 0)):
        # Pallas's pipeline is one for int32.
        with compile_target(capability), jax.enable_x64(way == "blocks"):
            found = str(jax.make_jaxpr(step)(x, w)).count("name=fp8_grouped_gemm")
            assert found == (count if way == "vmap" else 2 * count)


@needs_mosaic
@pytest.mark.parametrize(("capability", "is_told"), [(9.0, False), (10.0, True)])
def test_who_is_told_that_blocks_are_multiplied_in_a_wide_dtype(capability, is_told, monkeypatch):
    """Not Hopper; Blackwell, whose own block-scaled GEMM is none of a ragged dot."""
    monkeypatch.setattr("fp8flax._core.gemm.units.compute_capability", lambda: capability)
    f = partial(fp8_ragged_dot, states=States(), recipe=fp8.Float8BlockScaling())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(f, jnp.zeros((64, 32)), jnp.zeros((2, 32, 16)), jnp.array([10, 20]))
    assert ["has no units for these" in str(w.message) for w in caught] == [True] * is_told
