"""torchao's recipes, written as a ``CustomRecipe``, beside a reference in NumPy of what torchao does."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_entries
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
        recipe = getattr(gpu_entries.RECIPES[f"torchao-{name}"].gemms, gemm)
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
