"""One GEMM of codes and scales: right wherever its result is in range, scaled in float32."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8flax as fp8
from fp8flax._core import scaling
from fp8flax._core.gemm import cuda, cuda_casts
from fp8flax._core.gemm.gpus import compile_target
from fp8flax._core.gemm.kernels.block_gemm import block_gemm
from fp8flax._core.gemm.kernels.block_quantize import block_quantize
from fp8flax._core.plans.contraction import STATELESS, States
from fp8flax._core.plans.conv import fp8_conv_general_dilated
from fp8flax._core.plans.dot_general import fp8_dot_general
from fp8flax._core.plans.ragged_dot import fp8_ragged_dot
from fp8flax._core.state.state import ScalingState
from tests import reference_recipes
from tests.cases import MATMUL, cells, error_of_product, in_the_place_of_hoppers, with_reference

pytestmark = [pytest.mark.optimized, pytest.mark.oldest]

TINY, HUGE = 2.0**-126, float(np.finfo(np.float32).max)


def numbers(rng, lowest, highest, size):
    """Float32 numbers of every magnitude between two powers of two."""
    return (2.0 ** rng.uniform(lowest, highest, size)).astype(np.float32)


def test_scales_are_applied_in_range():
    """All that is in the range of float32 is right, and what was without care has the same bits."""
    rng, size = np.random.default_rng(0), 300_000
    total = numbers(rng, -32, 47, size) * rng.choice([-1, 1], size).astype(np.float32)
    lhs, rhs = (numbers(rng, -126, 127.99, size) for _ in range(2))
    actual = jax.jit(scaling.apply_scales)(total, lhs, rhs)
    plainly = np.asarray(jax.jit(lambda total, lhs, rhs: total * lhs * rhs)(total, lhs, rhs))
    exact = total.astype(np.float64) * lhs * rhs
    in_range = (np.abs(exact) >= TINY) & (np.abs(exact) <= 0.999999 * HUGE)
    np.testing.assert_allclose(actual[in_range], exact[in_range], rtol=2**-22)
    was_right = in_range & np.isfinite(plainly) & (plainly != 0)
    np.testing.assert_array_equal(actual[was_right], plainly[was_right])
    assert np.mean(was_right[in_range]) < 0.97
    too_large = np.abs(exact) > 1.000001 * HUGE
    np.testing.assert_array_equal(actual[too_large], np.sign(exact[too_large]) * np.inf)
    np.testing.assert_array_less(np.abs(actual[np.abs(exact) < TINY / 2]), 2 * TINY)


@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan])
def test_scales_that_are_no_numbers_stay_that(scale):
    totals, ones = np.float32([0, -3, np.inf]), np.float32(1)
    with np.errstate(invalid="ignore"):
        expected = totals * np.float32(scale)
    for scales in ((np.float32(scale), ones), (ones, np.float32(scale))):
        np.testing.assert_array_equal(scaling.apply_scales(totals, *scales), expected)


RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=2),
    "tensorwise": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "MX": fp8.MXFP8BlockScaling(),
    "128 blocks": fp8.Float8BlockScaling(),
    "128 blocks, float32": fp8.Float8BlockScaling(use_f32_scales=True),
}
MAGNITUDES = [
    # Of input, kernel and gradient of the result; all three products are in the range of float32.
    (1e37, 1e-12, 1e-3),
    (1e-12, 1e37, 1e-3),
    (1e-30, 1e-5, 1e-3),
    (1e30, 1e-30, 1e-5),
    (1.0, 0.1, 1e-32),
    (1e-35, 1e30, 1e2),
]
SHAPE = (40, 150, 24)


def tensors(magnitudes, shape=SHAPE):
    rng = np.random.default_rng(0)
    M, K, N = shape
    return [
        np.float32(rng.uniform(-1, 1, shape) * magnitude)
        for shape, magnitude in zip(((M, K), (K, N), (M, N)), magnitudes)
    ]


def back(quantizer, x, contract):
    """What is left of a matrix after quantization, with past amaxes as the current ones; float64."""
    if isinstance(quantizer, fp8.DelayedQuantizer):
        return reference_recipes.dequantize(*reference_recipes.tensorwise(x, quantizer.dtype.name))
    return with_reference(quantizer, x, contract)


def check(actual, expected, lhs, rhs):
    """Beside rounding, what is no normal number may be lost: an element, or one of the products in it."""
    lost = TINY * lhs.shape[-1] * expected.size**0.5
    error = np.linalg.norm(np.asarray(actual, np.float64) - expected)
    assert error - lost <= 1e-6 * np.linalg.norm(lhs) * np.linalg.norm(rhs)


def calibrated(recipe, x, w, g):
    """States that have seen the tensors."""
    amaxes = dict(zip(("input", "kernel", "output_grad"), (np.abs(t).max() for t in (x, w, g))))
    return States(
        **{role: ScalingState(jnp.ones(1), jnp.full(2, amaxes[role])) for role in recipe.gemms.delayed}
    )


def check_three_gemms(recipe, form="direct"):
    @jax.jit
    def run(states, x, w, g):
        dot = partial(fp8_dot_general, dimension_numbers=MATMUL, states=states, recipe=recipe, form=form)
        out, vjp = jax.vjp(dot, x, w)
        return out, *vjp(g)

    forward, dgrad, wgrad = recipe.gemms.forward, recipe.gemms.dgrad, recipe.gemms.wgrad
    for magnitudes in MAGNITUDES:
        x, w, g = tensors(magnitudes)
        for actual, lhs, rhs in zip(
            run(calibrated(recipe, x, w, g), x, w, g),
            (back(forward.lhs, x, 1), back(dgrad.lhs, g, 1), back(wgrad.lhs, x, 0).T),
            (back(forward.rhs, w, 0), back(dgrad.rhs, w, 1).T, back(wgrad.rhs, g, 0)),
        ):
            expected = lhs @ rhs
            assert 1e3 * TINY < np.max(np.abs(expected)) < HUGE
            check(actual, expected, lhs, rhs)


BOTH_FORMS = list(itertools.product(RECIPES, ["direct", "qdq"]))


@pytest.mark.parametrize(
    ("name", "form"),
    cells(BOTH_FORMS, repeated=[c for c in BOTH_FORMS if c[1] == "qdq" and c[0] not in ("delayed", "MX")]),
)
def test_magnitudes_that_only_the_result_is_in_range_of(name, form):
    check_three_gemms(RECIPES[name], form)


def test_scales_that_are_constants():
    """XLA would multiply them, which makes zero of these; their sum of codes is large."""
    x, w = np.full((4, 32), 1e-25, np.float32), np.full((32, 8), 1e-13, np.float32)
    recipe = RECIPES["delayed"]
    states = calibrated(recipe, x, w, np.ones(1, np.float32))
    out = jax.jit(lambda x, w: fp8_dot_general(x, w, MATMUL, states=states, recipe=recipe))(x, w)
    np.testing.assert_allclose(out, np.full((4, 8), 32 * 1e-25 * 1e-13), rtol=1e-6)


@pytest.mark.parametrize(
    "name", cells(["tensorwise", "axiswise", "128 blocks, float32"], repeated=["tensorwise"])
)
def test_magnitudes_in_the_branch_for_gpus(name, monkeypatch):
    """Run here: our kernel interpreted, GEMMs of sizes that cublasLt does not take in float32."""

    def dot(gemm, lhs, rhs, precision, sum_dtype):
        # Of the blocks this is traced for programs on several GPUs, and not run.
        assert precision is None or name != "tensorwise"
        assert sum_dtype == jnp.float32
        return lax.dot_general(lhs.astype(sum_dtype), rhs.astype(sum_dtype), gemm.dimension_numbers)

    monkeypatch.setattr(lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
    monkeypatch.setattr(cuda, "dot", dot)
    kernel = partial(block_gemm, interpret=True)
    monkeypatch.setattr(cuda, "hopper_block_gemm", in_the_place_of_hoppers(kernel))
    monkeypatch.setattr(cuda, "block_gemm", kernel)
    monkeypatch.setattr(cuda_casts, "block_quantize", partial(block_quantize, interpret=True))
    with compile_target(9.0):
        check_three_gemms(RECIPES[name])


def test_the_block_kernel_in_range():
    run = jax.jit(partial(block_gemm, out_dtype=jnp.float32, in_float16=False, interpret=True))
    rng = np.random.default_rng(0)
    codes = [jnp.asarray(rng.normal(size=(1, n, 256)) * 90, jnp.float8_e4m3fn) for n in (40, 150)]
    for magnitudes in MAGNITUDES:
        scales = [
            jnp.asarray(magnitude / 448 * rng.uniform(1, 2, (1, n, 2)), jnp.float32)
            for n, magnitude in zip((40, 150), magnitudes)
        ]
        wide = [
            np.repeat(np.asarray(s, np.float64), 128, 2) * np.asarray(c, np.float64)
            for c, s in zip(codes, scales)
        ]
        check(run(*codes, *scales), wide[0] @ wide[1].transpose(0, 2, 1), *wide)


def test_a_result_out_of_range_is_that_of_a_plain_product():
    x, w = np.full((4, 16), 1e3, np.float32), np.full((16, 8), 1e3, np.float32)
    dot = partial(fp8_dot_general, x, w, MATMUL, recipe=RECIPES["tensorwise"])
    np.testing.assert_array_equal(dot(preferred_element_type=jnp.float16), np.full((4, 8), np.inf))
    np.testing.assert_allclose(dot(preferred_element_type=jnp.bfloat16), x @ w, rtol=2**-8)


@pytest.mark.parametrize("name", cells(["tensorwise", "axiswise"], repeated=["tensorwise"]))
def test_the_ragged_dot_in_range(name):
    sizes = np.array([10, 30])

    @jax.jit
    def run(x, w, g):
        dot = partial(fp8_ragged_dot, group_sizes=sizes, states=STATELESS, recipe=RECIPES[name])
        out, vjp = jax.vjp(dot, x, jnp.stack([w, w]))
        return out, *vjp(g)

    x, w, g = tensors((1e37, 1e-12, 1e-3))
    out, dx, dw = run(x, w, g)
    assert error_of_product(out, x.astype(np.float64) @ w, x, w) <= 0.02
    assert error_of_product(dx, g.astype(np.float64) @ w.T, g, w) <= 0.02
    for actual, rows in zip(dw, (slice(10), slice(10, 40))):
        assert error_of_product(actual, x[rows].astype(np.float64).T @ g[rows], x[rows], g[rows]) <= 0.02


@pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls:UserWarning")
def test_a_convolution_in_range():
    x, w = (np.float32(np.random.default_rng(i).uniform(-1, 1, (2, 6, 4))) for i in range(2))
    w = w[0, :3, :, None] * np.ones((3, 4, 5), np.float32)

    def convolve(x, w):
        return fp8_conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), recipe=RECIPES["tensorwise"]
        )

    @jax.jit
    def run(x, w, g):
        out, vjp = jax.vjp(convolve, x, w)
        return out, *vjp(g)

    # Powers of two, by which nothing else may change.
    g = np.ones((2, 6, 5), np.float32)
    plain = run(x, w, g)
    scaled = run(x * np.float32(2.0**120), w * np.float32(2.0**-40), g * np.float32(2.0**-10))
    for ours, expected, exponent in zip(scaled, plain, (80, -50, 110)):
        np.testing.assert_array_equal(ours, np.ldexp(expected, exponent))
