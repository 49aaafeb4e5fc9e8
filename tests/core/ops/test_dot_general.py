"""The direct form: transposes, values beside the quantize-dequantize form, what it keeps and lowers to."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8flax as fp8
from fp8flax._core.state.state import ScalingState
from tests.cases import (
    CONTRACTIONS,
    MATMUL,
    OWG,
    Block,
    fp8_dot_general,
    kept,
    name_of,
    states_of,
    vjp_of,
)

POLICIES = jax.checkpoint_policies


def multiply(lhs, rhs, dims=MATMUL, *args, states=None, recipe=None):
    recipe = fp8.DelayedScaling(amax_history_len=2) if recipe is None else recipe
    states = states_of(recipe) if states is None else states
    return fp8_dot_general(lhs, rhs, dims, *args, states=states, recipe=recipe)


def lowered_for_cuda(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def algorithms(text):
    """Returns each GEMM of a StableHLO text: "fast", "exact" or "default", and its operands' dtypes."""
    found = []
    for line in text.splitlines():
        if "stablehlo.dot_general" in line:
            fast = re.search(r"allow_imprecise_accumulation = (\w+)", line)
            word = "default" if fast is None else {"true": "fast", "false": "exact"}[fast.group(1)]
            lhs, rhs = re.search(r": \(tensor<(.*?)>, tensor<(.*?)>\) ->", line).groups()
            found.append((word, lhs.split("x")[-1], rhs.split("x")[-1]))
    return found


CROSSED = "two contracting, crossed", "two batches, moved"
EXACT = {
    fp8.DelayedScaling(amax_history_len=2): (
        *("rhs transposed", *CROSSED, "outer product", "dot to a scalar", "no rows"),
    ),
    fp8.Float8CurrentScaling(granularity="axiswise", use_power_2_scales=True): (*CROSSED, "no rows"),
    fp8.Float8BlockScaling(): (*CROSSED, "dot to a scalar"),
    fp8.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True): (
        *(*CROSSED, "outer product", "dot to a scalar"),
    ),
}


@pytest.mark.parametrize(
    ("recipe", "contraction"),
    [(recipe, name) for recipe, names in EXACT.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_integers_multiply_exactly_forward_and_backward(recipe, contraction):
    """The codes hold these integers: all three GEMMs are those of ``lax.dot_general``."""
    lhs_shape, rhs_shape, dims = CONTRACTIONS[contraction]
    dtype = jnp.float32 if recipe.gemms.delayed else jnp.bfloat16
    rng = np.random.default_rng(0)
    limit = 1 if isinstance(recipe, fp8.NVFP4BlockScaling) else 3  # of the amax of each of its blocks
    lhs, rhs = (jnp.asarray(rng.integers(-limit, limit + 1, s), dtype) for s in (lhs_shape, rhs_shape))
    plain = partial(lax.dot_general, dimension_numbers=dims)
    g = jnp.asarray(rng.integers(-limit, limit + 1, jax.eval_shape(plain, lhs, rhs).shape), dtype)

    @jax.jit
    def expected(lhs, rhs, g):
        out, vjp = jax.vjp(plain, lhs, rhs)
        return out, *vjp(g)

    for ours, theirs in zip(vjp_of(recipe, dims)(lhs, rhs, g), expected(lhs, rhs, g)):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(ours, theirs)


def test_float16_does_not_overflow_on_the_way():
    """448 * 448 * 64 is far above the largest float16; times the scales it is not."""
    x, w = jnp.full((2, 64), 4.48, jnp.float16), jnp.full((64, 3), 4.48, jnp.float16)
    states = states_of(fp8.DelayedScaling(amax_history_len=2), 0.01)
    expected = np.full((2, 3), 4.48 * 4.48 * 64)
    np.testing.assert_allclose(multiply(x, w, states=states), expected, rtol=2e-3)
    lines = lowered_for_cuda(partial(multiply, states=states), x, w).splitlines()
    dots = [line for line in lines if "stablehlo.dot_general" in line]
    assert dots
    assert not any("f16>" in line for line in dots)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [(1e30, jnp.float32, np.inf), (1e30, jnp.float64, 4e60), (0.0, jnp.bfloat16, 0.0)],
    ids=name_of,
)
def test_scales_whose_product_overflows(value, dtype, expected):
    with jax.enable_x64(dtype == jnp.float64):
        x, w = jnp.full((2, 4), value, dtype), jnp.full((4, 3), value, dtype)
        scale = jnp.full((1,), 1e30 / 448, jnp.float32)
        state = ScalingState(scale, jnp.zeros((1,), jnp.float32))
        states = dict.fromkeys(("input", "kernel", "output_grad"), state)
        out = jax.jit(lambda x, w, states: multiply(x, w, states=states))(x, w, states)
        np.testing.assert_allclose(out, np.full((2, 3), expected), rtol=1e-6)


@pytest.mark.newest
class TestOnCuda:
    """The programs that the compiler for NVIDIA GPUs gets; nothing is compiled."""

    x, w = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 16), jnp.bfloat16)

    def gemms(self, x, w, *args, **kwargs):
        def f(x, w, g):
            out, vjp = jax.vjp(lambda x, w: multiply(x, w, MATMUL, *args, **kwargs), x, w)
            return out, vjp(g)

        out = jax.eval_shape(lambda x, w: multiply(x, w, MATMUL, *args, **kwargs), x, w)
        return algorithms(lowered_for_cuda(f, x, w, jnp.ones(out.shape, out.dtype)))

    def test_fp8_operands_and_the_default_accumulation(self):
        assert self.gemms(self.x, self.w) == [
            ("fast", "f8E4M3FN", "f8E4M3FN"),
            ("exact", "f8E5M2", "f8E4M3FN"),
            ("exact", "f8E4M3FN", "f8E5M2"),
        ]

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16], ids=lambda d: d.__name__)
    def test_whatever_the_dtype_and_the_accumulation(self, dtype):
        words = ("exact", "default", "fast")
        recipe = fp8.DelayedScaling(amax_history_len=2, accumulation=words)
        gemms = self.gemms(self.x.astype(dtype), self.w.astype(dtype), recipe=recipe)
        assert [(word, lhs[:2] + rhs[:2]) for word, lhs, rhs in gemms] == [(w, "f8f8") for w in words]

    @pytest.mark.parametrize(
        ("precision", "expected"),
        [
            (lax.Precision.HIGH, "exact"),
            ((lax.Precision.DEFAULT, lax.Precision.HIGHEST), "exact"),
            (("default", "default"), "fast"),
        ],
    )
    def test_precision_sets_all_three(self, precision, expected):
        assert [g[0] for g in self.gemms(self.x, self.w, precision)] == [expected] * 3

    @pytest.mark.parametrize("shapes", [((32, 17), (17, 16)), ((32, 64), (64, 8))], ids=str)
    def test_sizes_that_cublaslt_would_pad_go_to_xla(self, shapes):
        gemms = self.gemms(*(jnp.ones(s, jnp.bfloat16) for s in shapes))
        assert [g[0] for g in gemms] == ["default"] * 3
        assert {g[1][:2] for g in gemms} == {"f8"}

    def test_e5m2_by_e5m2_goes_to_xla(self):
        recipe = fp8.DelayedScaling(fp8_format=fp8.Format.E5M2, amax_history_len=2)
        assert self.gemms(self.x, self.w, recipe=recipe) == [("default", "f8E5M2", "f8E5M2")] * 3

    def test_fnuz_is_emulated(self):
        recipe = fp8.DelayedScaling(fp8_format=fp8.Format.HYBRID_FNUZ, amax_history_len=2)
        assert self.gemms(self.x, self.w, recipe=recipe) == [("default", "f32", "f32")] * 3

    def test_elsewhere_the_values_are_multiplied_in_float32(self):
        text = jax.jit(multiply).lower(self.x, self.w).as_text()
        assert algorithms(text) == [("default", "f32", "f32")]


@pytest.mark.parametrize(
    "bad", ["fastest please", 3, lax.DotAlgorithmPreset.BF16_BF16_F32, ("high", "what")]
)
def test_a_precision_that_cannot_be_honoured(bad):
    with pytest.raises((TypeError, ValueError), match="(?i)precision"):
        multiply(jnp.ones((2, 3)), jnp.ones((3, 4)), MATMUL, bad)


OP, M, K, N = fp8.Fp8DotGeneralOp, 64, 32, 48
SCALARS = 3 * 4 + 2 * 2 + 2 * 4
"""Bytes of three float32 scales, of the bfloat16 amaxes of two tensors, and of two scales beside codes."""
DIGESTS = 3 * 3 * 4
"""Bytes of what the scales follow from."""


def scanned(block, length=8, **kwargs):
    return nn.scan(block, variable_axes={"params": 0, OWG: 0}, split_rngs={"params": True}, length=length)(
        **kwargs
    )


class TestResiduals:
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)

    def test_of_a_layer_are_half_those_of_bfloat16(self):
        plain, ours = Block(N), Block(N, fp8.Fp8DotGeneralOp)
        assert kept(plain, self.x) == 2 * (M * K + K * N)
        assert kept(ours, self.x) == M * K + K * N + SCALARS

    @pytest.mark.parametrize(
        ("policy", "per_layer"),
        [
            (POLICIES.save_only_these_names(*fp8.RESIDUAL_NAMES), M * K + K * K + SCALARS),
            (POLICIES.save_only_these_names("fp8_input", "fp8_scaling"), M * K + SCALARS),
            (POLICIES.dots_saveable, 2 * M * K + DIGESTS),
        ],
        ids=["keep FP8", "requantize the kernel", "dots, which FP8 GEMMs are not to JAX"],
    )
    def test_under_remat_and_scan(self, policy, per_layer):
        model = scanned(nn.remat(Block, policy=policy, prevent_cse=False), features=K, dot_general_cls=OP)
        assert kept(model, self.x) == 8 * per_layer

    def test_a_policy_can_keep_the_outputs(self):
        class Two(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.relu(Block(K, OP)(x)[0])
                return Block(K, OP)(x)[0]

        policy = POLICIES.save_from_both_policies(
            POLICIES.dots_saveable, POLICIES.save_only_these_names("fp8_output")
        )
        assert kept(nn.remat(Two, policy=policy)(), self.x) == 2 * M * K + 2 * M * K + 2 * DIGESTS

    def test_a_gemm_that_is_computed_again_starts_from_what_was_kept(self):
        """relu needs the result of the GEMM; the block's wide input is not kept for it."""

        class WithRelu(Block):
            @nn.compact
            def __call__(self, x, _=None):
                return nn.relu(Block(self.features, self.dot_general_cls)(x)[0]), None

        policy = POLICIES.save_only_these_names(*fp8.RESIDUAL_NAMES)
        block = nn.remat(WithRelu, policy=policy, prevent_cse=False)
        model = scanned(block, features=K, dot_general_cls=OP)
        assert kept(model, self.x) == 8 * (M * K + K * K + SCALARS)
