"""Which tiles hold rows of which expert, and ragged dots beside NumPy: on Hopper, and in tiles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.gemm import dispatch, hopper, hopper_experts, ragged
from fp8flax._core.gemm.gemm import Gemm
from fp8flax._core.gemm.gpus import GPUS, compiling_for
from fp8flax._core.ops.ragged_dot import RaggedDot
from fp8flax._core.qtensor import Dims
from tests.cases import error_of_product, struct, tiled_gemm_in_jax, with_reference

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


E4M3 = jnp.float8_e4m3fn
SQUARE = fp8.Float8BlockScaling(use_f32_scales=True).gemms.forward
ON_HOPPER, IN_TILES = hopper_experts.compute, partial(ragged.compute, dispatch.multiply)
QUANTIZERS = {
    "tensorwise": (fp8.CurrentQuantizer(dtype=E4M3),) * 2,
    "axiswise": (fp8.CurrentQuantizer(dtype=E4M3, granularity="axiswise"),) * 2,
    "blocks": (SQUARE.lhs, SQUARE.rhs),
}


def dims(x, axis):
    return Dims(3, (1 + axis,), 1, is_stack=True) if x.ndim == 3 else Dims(2, (axis,))


def quantized(quantizer, x, axis):
    return quantizer.quantize(jnp.asarray(x), dims(x, axis))


def check_ragged_dots(multiply, name, rows, sizes, depth, columns, out_dtype):
    """No NaN of a row leaves the row, or its group in a sum; no NaN of a kernel reaches rows of others.

    Rows of no expert are zeros.
    """
    of_rows, of_kernel = QUANTIZERS[name]
    rng, experts, spans = np.random.default_rng(0), len(sizes), bounds(rows, sizes)
    shapes = (rows, depth), (experts, columns, depth), (rows, columns)
    x, w, g = (np.asarray(rng.normal(size=shape), np.float32) for shape in shapes)
    # Each block with a scale of its own.
    x *= np.exp(2 * rng.normal(size=(rows, 1)))
    x[:, 128:], w[:, :, 128:], g[128:] = 8 * x[:, 128:], w[:, :, 128:] / 64, 128 * g[128:]
    w *= 2.0 ** np.arange(experts, dtype=np.float32)[:, None, None]
    poisoned = next(start for start, end in spans[1:] if start < end)  # in a tile with rows of other groups
    x[poisoned, 5] = np.nan
    spoiled = next(e for e, (start, end) in enumerate(spans) if start < end)  # its rows share a tile, too
    w[spoiled, 3, 7] = np.nan
    x[spans[-1][0] :] = g[spans[-1][0] :] = 0
    of_operands, tolerance = np.dtype(jnp.bfloat16), 2e-6 if out_dtype == jnp.float32 else 2**-8

    def run(contract, a, b):
        dtypes = of_operands, of_operands, np.dtype(out_dtype)
        program = jax.jit(partial(multiply, Gemm(*(dims(x, contract) for x in (a, b)), *dtypes)))
        out = program(a, b, np.array(sizes))
        assert "kept_wide" not in program.lower(a, b, np.array(sizes)).as_text(debug_info=True)
        assert out.dtype == out_dtype
        return np.asarray(out, np.float64)

    out = run(1, quantized(of_rows, x, 1), quantized(of_kernel, w, 1))
    assert out.shape == (rows, columns)
    is_nan = np.zeros(out.shape, bool)
    is_nan[poisoned] = is_nan[slice(*spans[spoiled]), 3] = True
    np.testing.assert_array_equal(np.isnan(out), is_nan)
    left, out = with_reference(of_rows, x, 1), np.delete(out, 3, 1)
    for e, (start, end) in enumerate(spans[:-1]):
        kept, kernel = [i for i in range(start, end) if i != poisoned], with_reference(of_kernel, w[e], 1).T
        kernel = np.delete(kernel, 3, 1)
        if kept:
            assert error_of_product(out[kept], left[kept] @ kernel, left[kept], kernel) <= tolerance
    assert not out[slice(*spans[-1])].any()

    out = run(0, *(quantized(of_rows, a, 0) for a in (x, g)))
    assert out.shape == (experts, depth, columns)
    left, right = (with_reference(of_rows, a, 0) for a in (x, g))
    for e, (start, end) in enumerate(spans[:-1]):
        is_poisoned = start <= poisoned < end
        assert np.isnan(out[e]).any(1).nonzero()[0].tolist() == [5] * is_poisoned
        if start < end:
            factors = np.delete(left[start:end], [5] * is_poisoned, 1).T, right[start:end]
            actual = np.delete(out[e], [5] * is_poisoned, 0)
            assert error_of_product(actual, factors[0] @ factors[1], *factors) <= tolerance
        else:
            assert not out[e].any()


CASES = {
    "blocks that two groups share": ("blocks", 140, (13, 0, 120), 136, 40, jnp.bfloat16),
    "rows left over, whole tiles": ("axiswise", 264, (0, 128, 100), 136, 40, jnp.float32),
    "few rows": ("tensorwise", 3, (1, 1), 16, 8, jnp.float32),
}


FIRST, *OTHERS = CASES


@pytest.mark.parametrize("case", [FIRST, *(pytest.param(case, marks=pytest.mark.long) for case in OTHERS)])
def test_ragged_dots_on_hopper(case, monkeypatch):
    monkeypatch.setattr(hopper, "tiled_gemm", tiled_gemm_in_jax)
    check_ragged_dots(ON_HOPPER, *CASES[case])


def test_ragged_dots_in_tiles_keep_float32_scales():
    check_ragged_dots(IN_TILES, "blocks", 140, (13, 0, 120), 136, 40, jnp.float32)


@pytest.mark.long
def test_ragged_dots_on_hopper_step_by_step(monkeypatch):
    """With the GPU kernel in the interpreter, which compiles it anew for each core."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    kernel = partial(hopper.tiled_gemm, interpret=InterpretGPUParams())
    monkeypatch.setattr(hopper, "num_cores", lambda: 1)
    monkeypatch.setattr(hopper, "tiled_gemm", kernel)
    check_ragged_dots(ON_HOPPER, *CASES[FIRST])


@pytest.mark.parametrize("blocks", [False, True])
def test_which_gpus_have_the_kernel(blocks):
    """Hopper, of operands of one dtype. For one GPU, and for several."""
    recipe = fp8.Float8BlockScaling() if blocks else fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3)
    f = partial(RaggedDot.in_fp8, recipe=recipe)
    x, w, sizes = jnp.zeros((64, 32)), jnp.zeros((2, 32, 16)), jnp.array([10, 20])

    def step(x, w):
        out, vjp = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
        return out, vjp(out)

    counts = {"h200": 3} if blocks else {None: 0, "h200": 3, "b200": 0}
    for gpu, count in counts.items():
        # Pallas's pipeline is one for int32.
        with compiling_for(GPUS.get(gpu)), jax.enable_x64(blocks):
            found = str(jax.make_jaxpr(step)(x, w)).count("name=fp8_grouped_gemm")
            assert found == 2 * count


@pytest.mark.parametrize(("experts", "count"), [(255, 3), (256, 0)])
def test_the_kernel_counts_elements_in_32_bits(experts, count):
    """256 kernels of 2048 times 4096 have 2**31 elements."""

    def step(x, w):
        out, vjp = jax.vjp(partial(RaggedDot.in_fp8, recipe=fp8.Float8BlockScaling()), x, w, sizes)
        return vjp(out)[:2]

    sizes = jnp.ones(experts, np.int32)
    operands = struct(512, 2048), struct(experts, 2048, 4096)
    with compiling_for(GPUS["h200"]):
        found = str(jax.make_jaxpr(step)(*operands)).count("name=fp8_grouped_gemm")
    assert found == 2 * count
