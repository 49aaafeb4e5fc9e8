"""The op under every recipe: values beside NumPy, what is kept for the backward pass, recipes in parts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from tests import reference_recipes
from tests.cases import (
    MATMUL,
    OWG,
    Block,
    error_of_product,
    fp8_dot_general,
    kept,
    three_products,
    variables_of,
    vjp_of,
    with_reference,
)

STATELESS = {
    "tensorwise": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "high-precision wgrad": fp8.Float8CurrentScaling(granularity="axiswise", high_precision_wgrad=True),
    "MX": fp8.MXFP8BlockScaling(),
    "MX, hybrid, floor": fp8.MXFP8BlockScaling(fp8_format=fp8.Format.HYBRID, scale_rounding="floor"),
    "128 blocks": fp8.Float8BlockScaling(),
    "128 blocks, float32": fp8.Float8BlockScaling(use_f32_scales=True, fp8_format=fp8.Format.HYBRID),
    "NVFP4": fp8.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "NVFP4, no squares": fp8.NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
}


@pytest.mark.newest
@pytest.mark.parametrize(
    "name",
    [
        *("tensorwise", "axiswise", "high-precision wgrad", "MX, hybrid, floor", "128 blocks, float32"),
        pytest.param("NVFP4", marks=pytest.mark.optimized),  # else another division rounds ties otherwise
        pytest.param("NVFP4, no squares", marks=[pytest.mark.long, pytest.mark.optimized]),
    ],
)
def test_three_gemms_beside_numpy(name):
    """Each operand is quantized from the wide tensor along the contraction of the GEMM that it enters."""
    M, K, N = 133, 70, 45
    recipe = STATELESS[name]
    run, is_rotated = vjp_of(recipe), name.startswith("NVFP4")
    for kind in ("random",) if is_rotated else ("heavy-tailed", "outliers", "tiny"):
        x, w, g = (
            reference_recipes.tensors(shape, seed)[kind if seed != 1 else "random"]
            for seed, shape in enumerate(((M, K), (K, N), (M, N)))
        )
        if is_rotated:
            x, w, g = (np.round(8 * a) / 4 for a in (x, w, g))  # float32 rotates multiples of 1/4 exactly
        out, dx, dw = run(x, w, g)
        for actual, (lhs, rhs) in zip((out, dx, dw), three_products(recipe, x, w, g)):
            if kind != "tiny" or actual is not dw:  # 1e-30 squared is no float32
                assert error_of_product(actual, lhs @ rhs, lhs, rhs) <= 1e-6


def test_the_quantize_dequantize_form_takes_delayed_scaling():
    op = fp8.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling(), form="qdq")
    with pytest.raises(ValueError, match=r"form='qdq' takes DelayedScaling.*got Float8CurrentScaling"):
        op.init({}, jnp.ones((2, 3)), jnp.eye(3), MATMUL)


def test_delayed_scaling_saturates_an_inf():
    x = jnp.array([[jnp.nan, 1.0], [jnp.inf, 1.0]])
    out = vjp_of(fp8.DelayedScaling())(x, jnp.eye(2), jnp.eye(2))[0]
    np.testing.assert_array_equal(out, [[np.nan, np.nan], [448.0, 1.0]])


@pytest.mark.parametrize("name", ["tensorwise", "axiswise", "128 blocks, float32"])
def test_nan_stays_where_it_is_and_inf_saturates(name):
    x = np.ones((4, 64), np.float32)
    x[0, 3], x[1, 5] = np.nan, np.inf
    run, w, g = vjp_of(STATELESS[name]), np.eye(64, 8, dtype=np.float32), np.ones((4, 8), np.float32)
    out, dx, dw = run(x, w, g)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()
    # The row beside them keeps its precision: no scale was spoiled.
    np.testing.assert_allclose(out[2], np.ones(8), rtol=1e-6)
    np.testing.assert_allclose(dx, np.tile(np.eye(64, 8).sum(1), (4, 1)), rtol=1e-6)
    assert np.isnan(dw[3]).all()
    expected = np.full((62, 8), 4.0)
    np.testing.assert_allclose(np.delete(np.asarray(dw), (3, 5), axis=0), expected, rtol=1e-6)
    # An Inf in the cotangent says that it overflowed: it becomes a NaN in what it reaches.
    g[2, 1] = np.inf
    _, dx, dw = run(np.ones_like(x), w, g)
    np.testing.assert_array_equal(np.isnan(dx).all(1), [False, False, True, False])
    np.testing.assert_array_equal(np.isnan(dw).all(0), np.arange(8) == 1)


@pytest.mark.parametrize("name", ["high-precision wgrad", "MX, hybrid, floor"])
def test_with_x64_and_nan_checks(name):
    """Nothing on the way is a NaN where the data hold none; float64 stays float64."""
    with jax.enable_x64(True), jax.debug_nans(True):
        x, w, g = (np.linspace(-1, 1, m * n).reshape(m, n) for m, n in ((4, 40), (40, 3), (4, 3)))
        x[0] = 0
        out, dx, dw = vjp_of(STATELESS[name])(x, w, g)
    assert {out.dtype, dx.dtype, dw.dtype} == {np.dtype(np.float64)}
    for actual, lhs, rhs in ((out, x, w), (dx, g, w.T), (dw, x.T, g)):
        assert error_of_product(actual, lhs @ rhs, lhs, rhs) <= 0.08


# Bytes kept for the backward pass.

M, K, N = 256, 384, 512
BFLOAT16 = 2 * (M * K + K * N)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "codes", "scales"),
    [
        # One scale for each tensor.
        ("tensorwise", M * K + K * N, 4 + 4),
        # For wgrad a scale per feature of the input, for dgrad one per row of the kernel.
        ("axiswise", M * K + K * N, 4 * K + 4 * K),
        # One byte per 32 codes.
        ("MX", M * K + K * N, (M * K + K * N) // 32),
        # float32 for each 128 codes of the input, and each 128x128 of the kernel.
        ("128 blocks", M * K + K * N, 4 * (M * K // 128 + K * N // 128**2)),
        # The input stays wide.
        ("high-precision wgrad", 2 * M * K + K * N, 4 * K),
    ],
)
def test_bytes_kept_for_the_backward_pass(name, codes, scales):
    """Only the orientation that the backward pass needs is kept, quantized from the wide tensor."""
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    assert kept(Block(N), x) == BFLOAT16
    ours = kept(Block(N, partial(fp8.Fp8DotGeneralOp, recipe=STATELESS[name])), x)
    assert ours == codes + scales
    if name != "high-precision wgrad":
        assert ours <= 0.55 * BFLOAT16


def test_what_fills_up_the_last_blocks_is_not_kept():
    """Many small matrices, as of the experts of a mixture: no code more than there are values."""
    B, M, K, N = 16, 8, 96, 40
    dims = (((2,), (1,)), ((0,), (0,)))
    lhs, rhs = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((B, M, K), (B, K, N)))
    dot = partial(fp8_dot_general, dimension_numbers=dims, recipe=STATELESS["128 blocks"])
    _, vjp = jax.eval_shape(partial(jax.vjp, dot), lhs, rhs)
    codes = [leaf for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.uint8 and leaf.ndim == 3]
    assert B * M * K + B * K * N <= sum(leaf.size for leaf in codes) <= (B * M * K + B * K * N) * 9 / 8


@pytest.mark.newest
class TestCustom:
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)

    def test_parts_of_different_recipes(self):
        """Delayed scaling forward, MXFP8 in dgrad, a wide operand in wgrad: state for two tensors only."""
        recipe = fp8.CustomRecipe(
            forward=fp8.DelayedScaling(amax_history_len=3).gemms.forward,
            dgrad=fp8.MXFP8BlockScaling().gemms.dgrad,
            wgrad=fp8.GemmRecipe(lhs=fp8.CurrentQuantizer(dtype=jnp.float8_e5m2)),
        )
        assert sorted(recipe.delayed) == ["input", "kernel"]
        op = fp8.Fp8DotGeneralOp(recipe=recipe)
        variables = variables_of(op, self.x, self.w, MATMUL)

        @jax.jit
        def run(variables, x, w):
            loss = lambda *args: jnp.sum(jnp.sin(op.apply(*args, MATMUL)))  # noqa: E731
            return fp8.grad(loss, (0, 1, 2))(variables, x, w)

        variables, *grads = run(variables, self.x, self.w)
        state = variables[OWG]
        assert len(state) == 4
        np.testing.assert_array_equal(state["input_amax_history"], [np.abs(self.x).max(), 0, 0])
        np.testing.assert_array_equal(state["kernel_amax_history"], [np.abs(self.w).max(), 0, 0])
        assert all(np.isfinite(grad).all() for grad in grads)

    blocks = fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=(1, 16))
    tensorwise = fp8.CurrentQuantizer(dtype=jnp.float8_e4m3fn)
    nvfp4 = fp8.NVFP4Quantizer()

    @pytest.mark.optimized
    @pytest.mark.parametrize(
        ("lhs", "rhs"),
        [
            *((None, blocks), (blocks, tensorwise), (tensorwise, blocks), (blocks, nvfp4)),
            *((tensorwise, nvfp4), pytest.param(None, nvfp4, marks=pytest.mark.long)),
        ],
        ids=str,
    )
    def test_blocks_meet_another_kind(self, lhs, rhs):
        forward = fp8.GemmRecipe(lhs=lhs, rhs=rhs)
        run = vjp_of(fp8.CustomRecipe(forward=forward))
        out, dx, dw = run(self.x, self.w, np.ones((16, 32), np.float32))
        x8, w8 = with_reference(forward.lhs, self.x, 1), with_reference(forward.rhs, self.w, 0)
        assert error_of_product(out, x8 @ w8, x8, w8) <= 1e-6
        np.testing.assert_allclose(dx, np.tile(self.w.sum(1), (16, 1)), rtol=1e-5)
        np.testing.assert_allclose(dw, np.tile(self.x.sum(0)[:, None], (1, 32)), rtol=1e-4, atol=1e-5)


def test_a_recipe_that_keeps_all_wide_can_be_differentiated_twice():
    dot = partial(fp8_dot_general, recipe=fp8.CustomRecipe())
    f = jax.jit(jax.hessian(lambda x: jnp.sum(dot(x, x, (((0,), (0,)), ((), ()))) ** 2)))
    x = jnp.arange(3.0)
    np.testing.assert_allclose(f(x), 4 * jnp.sum(x**2) * jnp.eye(3) + 8 * jnp.outer(x, x))
