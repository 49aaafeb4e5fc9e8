"""GEMMs: in the ways of NVIDIA GPUs, run on the CPU; in all of float32's range; of unknown sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.gemm import dispatch, hopper
from fp8flax._core.gemm.gemm import Gemm
from fp8flax._core.gemm.gpus import GPUS, compiling_for
from fp8flax._core.qtensor import Dims
from fp8flax._core.state.state import ScalingState
from tests.cases import (
    CONTRACTIONS,
    MATMUL,
    data,
    error_of_product,
    fp8_dot_general,
    struct,
    three_products,
    tiled_gemm_in_jax,
    vjp_of,
)
from tests.gpus import compiled_for_gpus, run_branch_for_gpus

SQUARE, PAIRS = (
    fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=(rows, 128), scale="float32") for rows in (128, 2)
)
BLOCKS = {
    "blocks of several rows": fp8.CustomRecipe(
        forward=fp8.GemmRecipe(lhs=SQUARE, rhs=PAIRS),
        dgrad=fp8.GemmRecipe(lhs=SQUARE, rhs=PAIRS),
        wgrad=fp8.GemmRecipe(lhs=PAIRS, rhs=SQUARE),
    ),
    "MX, hybrid, floor": fp8.MXFP8BlockScaling(fp8_format=fp8.Format.HYBRID, scale_rounding="floor"),
    "128 blocks": fp8.Float8BlockScaling(),
}


@pytest.mark.parametrize(
    ("name", "contraction", "target"),
    [
        ("MX, hybrid, floor", "matmul", "h200"),
        pytest.param("128 blocks", "wide", "h200", marks=pytest.mark.long),
        ("blocks of several rows", "matmul", "h200"),
        ("128 blocks", "two batches, moved", "b200"),
    ],
)
def test_the_lowering_for_gpus_has_the_same_values(name, contraction, target, monkeypatch):
    """The branch for NVIDIA GPUs, run here: our kernel interpreted, the block-scaled GEMM written out."""
    wide = ((150, 300), (300, 140), MATMUL)
    lhs_shape, rhs_shape, dims = wide if contraction == "wide" else CONTRACTIONS[contraction]
    lhs, rhs, g = data(0, lhs_shape, rhs_shape, dims, jnp.float32)
    expected = vjp_of(BLOCKS[name], dims)(lhs, rhs, g)
    calls = []

    def scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, preferred_element_type):
        calls.append("cuDNN")
        lhs, rhs = (
            x.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), 32, axis=2)
            for x, s in ((lhs, lhs_scale), (rhs, rhs_scale))
        )
        return jnp.einsum("bmk,bnk->bmn", lhs, rhs).astype(preferred_element_type)

    def interpreted(*args, **kwargs):
        calls.append("Pallas")
        return tiled_gemm_in_jax(*args, **kwargs)

    run_branch_for_gpus(monkeypatch)
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    monkeypatch.setattr(hopper, "tiled_gemm", interpreted)
    with compiling_for(GPUS[target]):
        actual = vjp_of(BLOCKS[name], dims)(lhs, rhs, g)
    backend = "cuDNN" if target == "b200" else None if name.startswith("MX") else "Pallas"
    # Ways that also run on a mesh are traced once more.
    assert set(calls) == {backend} - {None}
    assert len(calls) in ((0,) if backend is None else range(3, 7))
    for ours, wanted, factors in zip(actual, expected, ((lhs, rhs), (g, rhs), (lhs, g))):
        assert error_of_product(ours, wanted, *factors) <= 1e-6


@pytest.mark.parametrize("axes", [(0, None), pytest.param((None, 0), marks=pytest.mark.long)], ids=str)
def test_block_scaled_gemms_under_vmap(axes, monkeypatch):
    """The kernels take a batch as more matrices, or more rows of one of the operands; never a loop."""
    rng = np.random.default_rng(0)
    operands = [
        jnp.asarray(rng.normal(size=shape if axis is None else (3, *shape)), jnp.float32)
        for axis, shape in zip(axes, ((5, 130), (130, 7)))
    ]
    run = vjp_of(BLOCKS["128 blocks"], MATMUL)
    each = [[x if axis is None else x[i] for x, axis in zip(operands, axes)] for i in range(3)]
    expected = [run(*pair, jnp.ones((5, 7))) for pair in each]
    run_branch_for_gpus(monkeypatch)
    with compiling_for(GPUS["h200"]):
        run = vjp_of(BLOCKS["128 blocks"], MATMUL)
        actual = jax.vmap(run, (*axes, None))(*operands, jnp.ones((5, 7)))
    for i, one in enumerate(expected):
        for ours, wanted in zip(actual, one):
            np.testing.assert_allclose(ours[i], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("gpu")
def test_codes_are_never_multiplied_in_float16():
    """XLA multiplies tiny matrices one element at a time, in float16: 448 * 448 overflows to inf."""
    step = vjp_of(fp8.Float8CurrentScaling(), MATMUL)
    specs = [struct(2, 24), struct(24, 2), struct(2, 2)]
    assert "= f16[" not in compiled_for_gpus("h200", step, *specs)


@pytest.mark.parametrize("target", ["h200", "b200"])
def test_operands_that_are_filled_up_to_other_widths(target):
    """Blocks of 32 and of 128 columns, with 96 columns; devices of a mesh cannot split these."""
    lhs, rhs = (fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=(1, columns)) for columns in (32, 128))
    recipe = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=lhs, rhs=rhs))
    dot = partial(fp8_dot_general, dimension_numbers=MATMUL, recipe=recipe)
    with compiling_for(GPUS[target]):
        assert jax.eval_shape(dot, jnp.zeros((16, 96)), jnp.zeros((96, 16))).shape == (16, 16)


@pytest.mark.parametrize(("number", "fits"), [(4, True), (2**18, False)])
def test_sizes_are_counted_with_their_padding(number, fits):
    """A GPU kernel fills up each matrix of a stack to 128 rows."""
    codes = jax.ShapeDtypeStruct((number, 1, 128), jnp.float8_e4m3fn)
    operand = fp8.QTensor(codes, None, BLOCKS["128 blocks"].gemms.forward.lhs, (1, 1, 128))
    dtype = np.dtype(np.float32)
    product = Gemm(Dims(3, (2,), 1), Dims(3, (2,), 1), dtype, dtype, dtype)
    with compiling_for(GPUS["h200"]):
        assert (dispatch.backend_of(product, operand, operand) is hopper) == fits


def test_symbolic_sizes():
    (size,) = jax.export.symbolic_shape("16*b")
    recipe = fp8.Float8CurrentScaling()
    product = jax.jit(lambda x: fp8_dot_general(x, jnp.ones((16, 16)), MATMUL, recipe=recipe))
    exported = jax.export.export(product)(jax.ShapeDtypeStruct((size, 16), jnp.float32))
    np.testing.assert_allclose(exported.call(jnp.ones((32, 16))), np.full((32, 16), 16), rtol=1e-6)


# All of float32's range.

TINY, HUGE = 2.0**-126, float(np.finfo(np.float32).max)
MAGNITUDES = [
    # Input, kernel and gradient of the result. All three products are in the range of float32.
    (1e37, 1e-12, 1e-3),
    (1e-12, 1e37, 1e-3),
    (1e-30, 1e-5, 1e-3),
    (1e30, 1e-30, 1e-5),
    (1.0, 0.1, 1e-32),
    (1e-35, 1e30, 1e2),
]


def assert_in_range(actual, expected, lhs, rhs):
    """Checks a product of two matrices; subnormal elements and subnormal products may be lost."""
    lost = 2.0**-126 * lhs.shape[-1] * expected.size**0.5
    error = np.linalg.norm(np.asarray(actual, np.float64) - expected)
    assert error - lost <= 1e-6 * np.linalg.norm(lhs) * np.linalg.norm(rhs)


IN_RANGE = {
    "delayed": fp8.DelayedScaling(amax_history_len=2),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "MX": fp8.MXFP8BlockScaling(),
    "128 blocks, float32": fp8.Float8BlockScaling(use_f32_scales=True),
}


def tensors(magnitudes):
    rng, (M, K, N) = np.random.default_rng(0), (40, 150, 24)
    return [
        np.float32(rng.uniform(-1, 1, shape) * magnitude)
        for shape, magnitude in zip(((M, K), (K, N), (M, N)), magnitudes)
    ]


def calibrated(recipe, x, w, g):
    """States that have seen the tensors."""
    amaxes = dict(zip(("input", "kernel", "output_grad"), (np.abs(t).max() for t in (x, w, g))))
    return {role: ScalingState(jnp.ones(1), jnp.full(2, amaxes[role])) for role in recipe.gemms.delayed}


def check_three_gemms(recipe, form="direct"):
    @jax.jit
    def run(states, x, w, g):
        options = {"states": states, "recipe": recipe, "form": form}
        out, vjp = jax.vjp(lambda x, w: fp8_dot_general(x, w, MATMUL, **options), x, w)
        return out, *vjp(g)

    for magnitudes in MAGNITUDES:
        x, w, g = tensors(magnitudes)
        products = three_products(recipe, x, w, g)
        for actual, (lhs, rhs) in zip(run(calibrated(recipe, x, w, g), x, w, g), products):
            expected = lhs @ rhs
            assert 1e3 * TINY < np.max(np.abs(expected)) < HUGE
            assert_in_range(actual, expected, lhs, rhs)


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "form"), [("delayed", "qdq"), ("delayed", "direct"), ("axiswise", "direct"), ("MX", "direct")]
)
def test_magnitudes_that_only_the_result_is_in_range_of(name, form):
    check_three_gemms(IN_RANGE[name], form)


@pytest.mark.optimized
@pytest.mark.parametrize(("x", "w", "amax"), [(1e-25, 1e-13, None), (0, 0, 4e32)])
def test_scales_that_are_constants(x, w, amax):
    """XLA would multiply them, which makes zero of the small ones, and inf of the large ones: a NaN."""
    lhs, rhs = np.full((4, 32), x, np.float32), np.full((32, 8), w, np.float32)
    recipe = IN_RANGE["delayed"]
    states = calibrated(recipe, *(np.float32([one if amax is None else amax]) for one in (x, w, 1)))
    out = jax.jit(lambda x, w: fp8_dot_general(x, w, MATMUL, states=states, recipe=recipe))(lhs, rhs)
    np.testing.assert_allclose(out, np.full((4, 8), 32 * x * w), rtol=1e-6)


@pytest.mark.long
@pytest.mark.optimized
def test_magnitudes_in_the_branch_for_gpus(monkeypatch):
    """Run here: our kernel for blocks that quantizes, interpreted, and the one that multiplies in JAX."""
    run_branch_for_gpus(monkeypatch)
    with compiling_for(GPUS["h200"]):
        check_three_gemms(IN_RANGE["128 blocks, float32"])


@pytest.mark.optimized
def test_a_result_out_of_range_is_that_of_a_plain_product():
    x, w = np.full((4, 16), 1e3, np.float32), np.full((16, 8), 1e3, np.float32)
    dot = partial(fp8_dot_general, x, w, MATMUL, recipe=fp8.Float8CurrentScaling())
    np.testing.assert_array_equal(dot(preferred_element_type=jnp.float16), np.full((4, 8), np.inf))
    np.testing.assert_allclose(dot(preferred_element_type=jnp.bfloat16), x @ w, rtol=2**-8)
