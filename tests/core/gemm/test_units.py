"""Who is warned that FP8 is emulated."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import fp8flax as fp8
from fp8flax._core.ops.contract import States
from fp8flax._core.ops.dot_general import fp8_dot_general
from fp8flax._core.ops.ragged_dot import fp8_ragged_dot
from tests.cases import MATMUL

OPS = {
    "dot": (partial(fp8_dot_general, dimension_numbers=MATMUL), jnp.zeros((2, 32)), jnp.zeros((32, 2))),
    "ragged dot": (fp8_ragged_dot, jnp.zeros((64, 32)), jnp.zeros((2, 32, 16)), jnp.array([10, 20])),
}
BLOCKS, MX = fp8.Float8BlockScaling(), fp8.MXFP8BlockScaling()
BLOCKS_F32 = fp8.Float8BlockScaling(use_f32_scales=True)
HYBRID_F32 = fp8.Float8BlockScaling(use_f32_scales=True, fp8_format=fp8.Format.HYBRID)


@pytest.mark.parametrize(
    ("op", "recipe", "capability", "is_told"),
    [
        ("dot", fp8.Float8CurrentScaling(), 9.0, False),
        ("dot", MX, 9.0, True),
        # Blackwell's units take scales that are powers of two.
        ("dot", MX, 10.0, False),
        ("dot", BLOCKS, 10.0, False),
        ("dot", BLOCKS_F32, 10.0, True),
        ("dot", HYBRID_F32, 10.0, True),
        ("ragged dot", BLOCKS, 9.0, False),
        # Its block-scaled GEMM is none of a ragged dot.
        ("ragged dot", BLOCKS, 10.0, True),
    ],
)
def test_who_is_told_that_blocks_are_multiplied_in_a_wide_dtype(
    op, recipe, capability, is_told, monkeypatch
):
    monkeypatch.setattr("fp8flax._core.gemm.units.compute_capability", lambda: capability)
    if op == "dot":
        f, args = (
            partial(fp8_dot_general, dimension_numbers=MATMUL),
            (jnp.zeros((2, 32)), jnp.zeros((32, 2))),
        )
    else:
        f, args = fp8_ragged_dot, (jnp.zeros((64, 32)), jnp.zeros((2, 32, 16)), jnp.array([10, 20]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(partial(f, recipe=recipe, states=States()), *args)
    assert all(issubclass(w.category, fp8.Fp8EmulationWarning) for w in caught)
    assert ["no units" in str(w.message) for w in caught] == [True] * is_told


def test_emulation_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            fp8_dot_general(jnp.ones((2, 3)), jnp.ones((3, 4)), MATMUL, recipe=fp8.Float8CurrentScaling())
    assert [w.category for w in caught] == [fp8.Fp8EmulationWarning]
    assert "emulated on cpu" in str(caught[0].message)
