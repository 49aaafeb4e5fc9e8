"""torchao's recipes by its names, beside a reference in NumPy of what torchao says and does."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.qtensor import View
from fp8flax._core.quantizers import quantized
from tests.cases import cells
from tests.reference import FP8, MAX, nearest_code

pytestmark = pytest.mark.optimized

M, K, N = 24, 32, 40
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
WIDE = None

# Per recipe and GEMM, for the left and the right operand: format, whether a scale per row, whether it is a
# power of two. Rows are those of the left operand, columns those of the right: all that is not summed over.
RECIPES = {
    "tensorwise": {
        "forward": ((E4M3, False, False), (E4M3, False, False)),
        "dgrad": ((E5M2, False, False), (E4M3, False, False)),
        "wgrad": ((E4M3, False, False), (E5M2, False, False)),
    },
    "rowwise": dict.fromkeys(("forward", "dgrad", "wgrad"), ((E4M3, True, True), (E4M3, True, True))),
    "rowwise_with_gw_hp": {
        "forward": ((E4M3, True, True), (E4M3, True, True)),
        "dgrad": ((E4M3, True, True), (E4M3, False, True)),
        "wgrad": (WIDE, WIDE),
    },
}
# Which tensor is on each side of a GEMM, and which of its dimensions is summed over.
SIDES = {"forward": (("x", 1), ("w", 0)), "dgrad": (("g", 1), ("w", 1)), "wgrad": (("x", 0), ("g", 0))}


def torchao_cast(x, how, axis):
    """Returns FP8 codes, float64 values of them, and torchao's scale, with which it multiplies."""
    name, per_row, power_of_two = how
    x = np.asarray(x, np.float32)
    amax = np.max(np.abs(x), axis=axis if per_row else None, keepdims=per_row).astype(np.float64)
    scale = (MAX[name] / np.maximum(amax, 1e-12)).astype(np.float32)
    if power_of_two:
        scale = np.exp2(np.floor(np.log2(scale)))
    assert scale.dtype == np.float32
    values = nearest_code((x * scale).astype(np.float64), name)
    return values.astype(FP8[name]), values, scale


def tensors(dtype, seed=0):
    """Returns x, w and g: rows of many sizes, of zeros, of an amax below 1e-12, and with an outlier."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in (("x", (M, K)), ("w", (K, N)), ("g", (M, N))):
        t = rng.standard_normal(shape) * np.exp(2 * rng.standard_normal((shape[0], 1)))
        t[1], t[:, 2] = 0, 0
        t[3] *= 1e-14
        t[4, 5] *= 1e3
        made[name] = np.asarray(jnp.asarray(t, dtype), np.float32)
    return made


@pytest.mark.parametrize(
    ("name", "dtype"),
    cells(
        list(itertools.product(RECIPES, ["float32", "bfloat16"])),
        repeated=[("tensorwise", "float32"), ("rowwise", "bfloat16")],
    ),
)
def test_codes_and_scales_bit_for_bit(name, dtype):
    made = tensors(dtype)
    made["tiny"] = {key: t * np.float32(1e-16) for key, t in made.items()}
    both = [made, made.pop("tiny")]
    for gemm, sides in SIDES.items():
        recipe = getattr(fp8.torchao_recipe(name), gemm)
        for (tensor, axis), quantizer, how in zip(sides, (recipe.lhs, recipe.rhs), RECIPES[name][gemm]):
            if how is WIDE:
                assert quantizer is None
                continue
            view = View(made[tensor].shape, (axis,), ())
            quantize = jax.jit(partial(quantized, quantizer, view=view))
            for case in both:
                x = jnp.asarray(case[tensor], dtype)
                codes, scale = jax.tree.leaves(quantize(x))
                expected, _, multiplier = torchao_cast(x, how, axis)
                assert codes.dtype == expected.dtype
                np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), expected.view(np.uint8))
                np.testing.assert_array_equal(scale, np.float32(1) / multiplier)


@pytest.mark.parametrize("name", RECIPES)
def test_the_three_gemms(name):
    made = tensors(jnp.float32)
    op = fp8.Fp8DotGeneralOp(recipe=fp8.torchao_recipe(name))
    forward = jax.jit(lambda x, w: op.apply({}, x, w, (((1,), (0,)), ((), ()))))
    y, vjp = jax.vjp(forward, jnp.asarray(made["x"]), jnp.asarray(made["w"]))
    for gemm, result in zip(SIDES, (y, *vjp(jnp.asarray(made["g"])))):
        left, right = made[SIDES[gemm][0][0]], made[SIDES[gemm][1][0]]
        if RECIPES[name][gemm] != (WIDE, WIDE):
            _, left, left_scale = torchao_cast(left, RECIPES[name][gemm][0], SIDES[gemm][0][1])
            _, right, right_scale = torchao_cast(right, RECIPES[name][gemm][1], SIDES[gemm][1][1])
            left, right = left / left_scale, right / right_scale
        exact = np.tensordot(
            left.astype(np.float64), right.astype(np.float64), ([SIDES[gemm][0][1]], [SIDES[gemm][1][1]])
        )
        np.testing.assert_allclose(result, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


def test_an_amax_between_two_powers_of_two():
    """Ours is exact to the last bit where torchao's float32 logarithm rounds."""
    quantizer = fp8.torchao_recipe("rowwise").forward.lhs
    above = np.nextafter(np.float32(448 * 2.0**40), np.float32(np.inf))
    for amax, scale in ((448 * 2.0**40, 2.0**40), (above, 2.0**41)):
        ours = quantized(quantizer, jnp.full((1, 4), amax, jnp.float32), View((1, 4), (1,), ())).scale
        np.testing.assert_array_equal(ours, [[scale]])


def test_accumulation_is_fast_forward_alone():
    for name in RECIPES:
        gemms = fp8.torchao_recipe(name)
        ways = [gemm.accumulation for gemm in (gemms.forward, gemms.dgrad, gemms.wgrad)]
        assert ways == ["fast", "exact", "exact"]


def test_they_are_not_current_scaling():
    """Each recipe differs from the recipe of ours that is most like it."""
    axiswise = fp8.Float8CurrentScaling(granularity="axiswise", high_precision_wgrad=True).gemms
    theirs = fp8.torchao_recipe("rowwise_with_gw_hp")
    assert theirs.wgrad == axiswise.wgrad
    assert theirs.forward != axiswise.forward
    assert theirs.dgrad != axiswise.dgrad
    assert hash(theirs) == hash(fp8.torchao_recipe("rowwise_with_gw_hp"))


def test_another_name():
    with pytest.raises(
        ValueError, match=r"name must be one of \('tensorwise', 'rowwise', .*got 'all_axiswise'"
    ):
        fp8.torchao_recipe("all_axiswise")
