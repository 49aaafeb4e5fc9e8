"""Who is warned that FP8 is emulated."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import fp8flax as fp8
from fp8flax._core.gemm.units import has_units_for_blocks, warn_if_emulated
from fp8flax._core.ops.contract import States
from fp8flax._core.ops.dot_general import fp8_dot_general
from fp8flax._core.ops.ragged_dot import fp8_ragged_dot
from tests.cases import MATMUL, dense_step


def test_an_older_gpu_is_told_that_block_scales_are_not_native(monkeypatch):
    monkeypatch.setattr("fp8flax._core.gemm.units.compute_capability", lambda: 9.0)
    x, w = jnp.ones((2, 32)), jnp.ones((32, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for recipe in (fp8.Float8CurrentScaling(), fp8.MXFP8BlockScaling()):
            assert not caught
            jax.eval_shape(lambda x, w, r=recipe: fp8_dot_general(x, w, MATMUL, recipe=r), x, w)
    assert [w.category for w in caught] == [fp8.Fp8EmulationWarning]
    assert "no units" in str(caught[0].message)


MIXED = fp8.Float8BlockScaling(use_f32_scales=True, fp8_format=fp8.Format.HYBRID)


@pytest.mark.parametrize(("capability", "is_told"), [(9.0, False), (10.0, True)])
def test_who_is_told_that_blocks_are_multiplied_in_a_wide_dtype(capability, is_told, monkeypatch):
    """Not Hopper; Blackwell, whose own block-scaled GEMM is none of a ragged dot."""
    monkeypatch.setattr("fp8flax._core.gemm.units.compute_capability", lambda: capability)
    f = partial(fp8_ragged_dot, states=States(), recipe=fp8.Float8BlockScaling())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(f, jnp.zeros((64, 32)), jnp.zeros((2, 32, 16)), jnp.array([10, 20]))
    assert ["no units" in str(w.message) for w in caught] == [True] * is_told


@pytest.mark.parametrize(
    ("recipe", "runs"),
    [
        (fp8.Float8BlockScaling(), True),
        (fp8.MXFP8BlockScaling(), True),
        (fp8.Float8BlockScaling(use_f32_scales=True), False),
        (MIXED, False),
    ],
    ids=["128-blocks", "mxfp8", "float32 scales", "float32 scales, two dtypes"],
)
def test_block_scales_on_blackwell(recipe, runs, monkeypatch):
    """Its units take scales that are powers of two."""
    gemms = recipe.gemms.forward, recipe.gemms.dgrad, recipe.gemms.wgrad
    assert [has_units_for_blocks(gemm, 10.0) for gemm in gemms] == [runs] * 3
    monkeypatch.setattr("fp8flax._core.gemm.units.compute_capability", lambda: 10.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_emulated(*gemms)
    assert ["block scales" in str(w.message) for w in caught] == [True] * (not runs)


def test_emulation_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            fp8_dot_general(jnp.ones((2, 3)), jnp.ones((3, 4)), MATMUL, recipe=fp8.Float8CurrentScaling())
    assert [w.category for w in caught] == [fp8.Fp8EmulationWarning]
    assert "emulated on cpu" in str(caught[0].message)


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_emulation_does_not_warn_again_after_an_audit():
    """Python shows a warning again after a change of its filters."""
    assert jax.config.jax_compilation_cache_dir  # with a cache, audit sets a filter
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for size in (3, 4):
            x, w = jnp.ones((2, size)), jnp.ones((size, 4))
            fp8_dot_general(x, w, MATMUL, recipe=fp8.Float8CurrentScaling())
            if size == 3:
                fp8.audit(*dense_step(256, 128, 128, fp8.Fp8DotGeneralOp))  # has a kernel in Triton
    assert [w.category for w in caught] == [fp8.Fp8EmulationWarning]
