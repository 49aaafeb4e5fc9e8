"""The kernels of a ragged dot on Hopper, interpreted step by step, beside NumPy; and what they multiply."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.gemm import ragged
from fp8flax._core.gemm.gemm import Gemm
from fp8flax._core.gemm.gpus import compile_target
from fp8flax._core.gemm.kernels import groups, tiled_gemm_hopper
from fp8flax._core.gemm.ragged import Ragged, grouped_products, grouped_sums
from fp8flax._core.ops.contract import STATELESS
from fp8flax._core.ops.ragged_dot import fp8_ragged_dot
from fp8flax._core.qtensor import Dims, QTensor
from tests.cases import error_of_product, with_reference
from tests.core.gemm.kernels.test_groups import SIZES, bounds

E4M3 = jnp.float8_e4m3fn


@jax.jit
def tiles_of_rows(sizes):
    """Returns the tiles of 304 rows, a multiple of 8."""
    tiling = ragged._tiling_of_rows(304, 256, 128, sizes.size)
    table = groups.table_of(304, sizes)
    return jax.vmap(partial(tiling.tile, table))(jnp.arange(tiling.num_tiles, dtype=jnp.int32))


@pytest.mark.parametrize(
    "sizes",
    [*SIZES, (2**31 - 1, 5, 5, -3), (2**30, 2**30, 2**30, 2**30), (-5, 10, 100, 7), (37, 38, 39, 40)],
)
def test_copies_begin_where_hopper_can(sizes):
    """At multiples of 8 rows, and each row of the result is written once: of its own group, or zero."""
    rows, found = 304, tiles_of_rows(np.array(sizes, np.int32))
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
    tiling = ragged._tiling_of_groups(depth, 128, len(sizes))

    @jax.jit
    def tiles(sizes):
        table = groups.table_of(384, sizes, align)
        return jax.vmap(partial(tiling.tile, table))(jnp.arange(tiling.num_tiles, dtype=jnp.int32))

    found = jax.tree.map(np.asarray, tiles(np.array(sizes)))
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


@pytest.fixture
def _one_core(monkeypatch):
    """The interpreter compiles the kernel anew for each core that there is. One does all tiles, in turn."""
    monkeypatch.setattr(tiled_gemm_hopper, "num_cores", lambda: 1)


def interpreted(f, out_dtype, *, is_transposed=False):
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    dtype = np.dtype(out_dtype)
    gemm = Gemm((((1,), (1,)), ((), ())), dtype, dtype, dtype)
    product = Ragged(gemm, dtype, is_sum=f is grouped_sums, is_transposed=is_transposed)
    return jax.jit(partial(f, product, interpret=InterpretGPUParams()))


def quantized(rng, shape, scale_shape):
    quantizer = fp8.CurrentQuantizer(dtype=E4M3)
    scale = 2.0 ** rng.uniform(-3, 3, scale_shape)
    return QTensor(jnp.asarray(rng.normal(size=shape), E4M3), jnp.asarray(scale, jnp.float32), quantizer)


def wide(x):
    scale = np.asarray(x.scale, np.float64)
    return np.asarray(x.codes, np.float64) * scale.reshape(*scale.shape, *[1] * (x.codes.ndim - scale.ndim))


@pytest.mark.long
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
    out = interpreted(grouped_products, out_dtype)(lhs, kernels, np.array(sizes))
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
    out = interpreted(grouped_sums, out_dtype)(lhs, g, np.array(sizes))
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
@pytest.mark.usefixtures("_one_core")
def test_ragged_dots_of_blocks_on_hopper():
    """Blocks that two groups share, an empty one, rows left over; beside NumPy, by expert."""
    rng, rows, sizes, depth, columns = np.random.default_rng(0), 140, (13, 0, 120), 136, 40
    of_rows, of_kernel = (getattr(fp8.Float8BlockScaling().gemms.forward, x) for x in ("lhs", "rhs"))
    spans, tolerance, out_dtype = bounds(rows, sizes), 2**-8, jnp.bfloat16
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
            dims = Dims(3, (1 + axis,), 1, is_stack=True) if a.ndim == 3 else Dims(2, (axis,))
            qs.append(quantizer.quantize(jnp.asarray(a), dims))
        run = interpreted(f, out_dtype, is_transposed=f is grouped_products)
        return np.asarray(run(*qs, np.array(sizes)), np.float64)

    out = multiplied(grouped_products, (of_rows, x, 1), (of_kernel, w, 0))[:, :columns]
    assert np.isnan(out).any(1).nonzero()[0].tolist() == [13]
    left = with_reference(of_rows, x, 1)
    for e, (start, end) in enumerate(spans[:-1]):
        kernel, mine = with_reference(of_kernel, w[e], 0), slice(start + (e == 2), end)
        if start < end:
            assert error_of_product(out[mine], left[mine] @ kernel, left[mine], kernel) <= tolerance
    assert not out[slice(*spans[-1])].any()

    x = x[:, :40]
    dw = multiplied(grouped_sums, (of_rows, x, 0), (of_rows, g, 0))
    left, right = (with_reference(of_rows, a, 0) for a in (x, g))
    assert np.argwhere(np.isnan(dw).any(2)).tolist() == [[2, 5]]
    dw[:, 5] = left[:, 5] = 0
    for e, (start, end) in enumerate(spans[:-1]):
        factors = left[start:end].T, right[start:end]
        if start < end:
            assert error_of_product(dw[e], factors[0] @ factors[1], *factors) <= tolerance
    assert not dw[1].any()


@pytest.mark.parametrize("way", ["plain", "blocks", pytest.param("vmap", marks=pytest.mark.long)])
def test_which_gpus_have_the_kernel(way):
    """Hopper, of operands of one dtype; under transformations too. For one GPU, and for several."""
    blocks = way == "blocks"
    recipe = fp8.Float8BlockScaling() if blocks else fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3)
    f = partial(fp8_ragged_dot, states=STATELESS, recipe=recipe)
    f = jax.vmap(f) if way == "vmap" else f
    x, w, sizes = jnp.zeros((64, 32)), jnp.zeros((2, 32, 16)), jnp.array([10, 20])
    if way == "vmap":
        x, w, sizes = (jnp.stack([a] * 2) for a in (x, w, sizes))

    def step(x, w):
        out, vjp = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
        return out, vjp(out)

    counts = {9.0: 3} if blocks else {None: 0, 9.0: 3, 10.0: 0}
    for capability, count in counts.items():
        # Pallas's pipeline is one for int32.
        with compile_target(capability), jax.enable_x64(way == "blocks"):
            found = str(jax.make_jaxpr(step)(x, w)).count("name=fp8_grouped_gemm")
            assert found == 2 * count


@pytest.mark.long  # the same scaling as that of a GEMM
@pytest.mark.optimized
def test_the_ragged_dot_in_range():
    sizes = np.array([10, 30])

    @jax.jit
    def run(x, w, g):
        dot = partial(
            fp8_ragged_dot,
            group_sizes=sizes,
            states=STATELESS,
            recipe=fp8.Float8CurrentScaling(granularity="axiswise"),
        )
        out, vjp = jax.vjp(dot, x, jnp.stack([w, w]))
        return out, *vjp(g)

    rng = np.random.default_rng(0)
    magnitudes = ((40, 150), 1e37), ((150, 24), 1e-12), ((40, 24), 1e-3)
    x, w, g = (np.float32(rng.uniform(-1, 1, shape) * size) for shape, size in magnitudes)
    out, dx, dw = run(x, w, g)
    assert error_of_product(out, x.astype(np.float64) @ w, x, w) <= 0.02
    assert error_of_product(dx, g.astype(np.float64) @ w.T, g, w) <= 0.02
    for actual, rows in zip(dw, (slice(10), slice(10, 40))):
        assert error_of_product(actual, x[rows].astype(np.float64).T @ g[rows], x[rows], g[rows]) <= 0.02
