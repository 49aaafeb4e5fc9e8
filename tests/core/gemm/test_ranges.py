"""GEMMs in all of float32's range, and of sizes that are not known."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8flax as fp8
from fp8flax._core.gemm import casts, gemm
from fp8flax._core.gemm.gpus import compile_target
from fp8flax._core.gemm.kernels.block_quantize import block_quantize
from fp8flax._core.ops.contract import STATELESS, States
from fp8flax._core.ops.dot_general import fp8_dot_general
from fp8flax._core.ops.ragged_dot import fp8_ragged_dot
from fp8flax._core.state.state import ScalingState
from tests import reference_recipes
from tests.cases import (
    MAGNITUDES,
    MATMUL,
    assert_in_range,
    block_gemm_in_jax,
    cells,
    error_of_product,
    with_reference,
)
from tests.gpus import run_branch_for_gpus


@pytest.mark.parametrize("name", ["b", "16*b"])
def test_symbolic_sizes(name):
    (size,) = jax.export.symbolic_shape(name)
    recipe = fp8.Float8CurrentScaling()
    product = jax.jit(lambda x: fp8_dot_general(x, jnp.ones((16, 16)), MATMUL, recipe=recipe))
    exported = jax.export.export(product)(jax.ShapeDtypeStruct((size, 16), jnp.float32))
    np.testing.assert_allclose(exported.call(jnp.ones((32, 16))), np.full((32, 16), 16), rtol=1e-6)


pytestmark = pytest.mark.optimized

TINY, HUGE = 2.0**-126, float(np.finfo(np.float32).max)


RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=2),
    "tensorwise": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "MX": fp8.MXFP8BlockScaling(),
    "128 blocks": fp8.Float8BlockScaling(),
    "128 blocks, float32": fp8.Float8BlockScaling(use_f32_scales=True),
}
SHAPE = (40, 150, 24)


def tensors(magnitudes, shape=SHAPE):
    rng = np.random.default_rng(0)
    M, K, N = shape
    return [
        np.float32(rng.uniform(-1, 1, shape) * magnitude)
        for shape, magnitude in zip(((M, K), (K, N), (M, N)), magnitudes)
    ]


def back(quantizer, x, contract):
    """Returns a matrix after quantization, float64. Past amaxes are the current ones."""
    if isinstance(quantizer, fp8.DelayedQuantizer):
        return reference_recipes.dequantize(*reference_recipes.tensorwise(x, quantizer.dtype.name))
    return with_reference(quantizer, x, contract)


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
            assert_in_range(actual, expected, lhs, rhs)


@pytest.mark.parametrize(("name", "form"), [*((name, "direct") for name in RECIPES), ("delayed", "qdq")])
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

    def dot(of, lhs, rhs, precision, sum_dtype):
        # With scales per block this is only traced, for programs on several GPUs.
        assert precision is None or name != "tensorwise"
        assert sum_dtype == jnp.float32
        return lax.dot_general(lhs.astype(sum_dtype), rhs.astype(sum_dtype), of.dims)

    run_branch_for_gpus(monkeypatch)
    monkeypatch.setattr(gemm, "_dot", dot)
    monkeypatch.setattr(gemm, "hopper_block_gemm", block_gemm_in_jax)
    monkeypatch.setattr(casts, "block_quantize", partial(block_quantize, interpret=True))
    with compile_target(9.0):
        check_three_gemms(RECIPES[name])


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
