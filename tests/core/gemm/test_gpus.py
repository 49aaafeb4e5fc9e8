"""The GPU that a program is compiled for, and who is warned that FP8 is emulated."""

import types
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import fp8flax as fp8
from fp8flax._core.gemm.gpus import GPUS, compiling_for, compute_capability, compute_capability_of
from tests.cases import MATMUL, fp8_dot_general


@pytest.mark.parametrize(
    ("device", "number"),
    [
        ({"platform": "cpu"}, 0),
        ({"platform": "cuda", "compute_capability": "10.0"}, 10.0),
        ({"platform": "gpu", "compute_capability": "gfx942"}, 0),
    ],
    ids=str,
)
def test_the_capability_of_a_device(device, number):
    assert compute_capability_of(types.SimpleNamespace(**device)) == number


def test_the_target_comes_before_the_first_device():
    assert compute_capability() == compute_capability_of(jax.devices()[0]) == 0
    with compiling_for(GPUS["l40s"]):
        assert compute_capability() == 8.9


BLOCKS, MX = fp8.Float8BlockScaling(), fp8.MXFP8BlockScaling()
BLOCKS_F32 = fp8.Float8BlockScaling(use_f32_scales=True)
E4M3 = jnp.float8_e4m3fn
CURRENT_BY_BLOCKS = fp8.CustomRecipe(
    forward=fp8.GemmRecipe(lhs=fp8.CurrentQuantizer(dtype=E4M3), rhs=fp8.BlockQuantizer(dtype=E4M3))
)
NVFP4 = fp8.NVFP4BlockScaling()
NVFP4_BY_BLOCKS = fp8.CustomRecipe(
    forward=fp8.GemmRecipe(lhs=fp8.NVFP4Quantizer(), rhs=fp8.BlockQuantizer(dtype=E4M3, block=(1, 16)))
)
E5M2_TWICE = fp8.MXFP8BlockScaling(fp8_format=fp8.Format.E5M2)


@pytest.mark.parametrize(
    ("recipe", "capability", "is_told"),
    [
        (MX, 9.0, True),
        # Blackwell's units take scales that are powers of two, but not e5m2 by e5m2.
        (MX, 10.0, False),
        (BLOCKS, 10.0, False),
        (BLOCKS_F32, 10.0, True),
        (E5M2_TWICE, 10.0, True),
        (NVFP4, 9.0, True),
        (NVFP4, 10.0, False),
        (NVFP4_BY_BLOCKS, 10.0, True),
        (fp8.Float8CurrentScaling(), 9.0, False),
        (fp8.Float8CurrentScaling(fp8_format=fp8.Format.HYBRID_FNUZ), 9.0, True),
        (CURRENT_BY_BLOCKS, 9.0, True),
    ],
)
def test_who_is_told_that_fp8_is_multiplied_in_a_wide_dtype(recipe, capability, is_told, monkeypatch):
    monkeypatch.setattr("fp8flax._core.gemm.dispatch.compute_capability", lambda: capability)
    dot = partial(fp8_dot_general, dimension_numbers=MATMUL, recipe=recipe)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(dot, jnp.zeros((2, 32)), jnp.zeros((32, 2)))
    assert all(issubclass(w.category, fp8.Fp8EmulationWarning) for w in caught)
    assert ["no units" in str(w.message) for w in caught] == [True] * is_told


def test_emulation_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            fp8_dot_general(jnp.ones((2, 3)), jnp.ones((3, 4)), MATMUL, recipe=fp8.Float8CurrentScaling())
    assert [w.category for w in caught] == [fp8.Fp8EmulationWarning]
    assert "emulated on cpu" in str(caught[0].message)
