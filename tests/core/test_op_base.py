"""The part of ops that Linen and NNX share, with an op of neither."""

import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._compat.max_dtype import to_max_dtype
from fp8flax._core.op_base import OpBase, StateLeaf, check_state_array
from fp8flax._core.plans.contraction import STATELESS
from fp8flax._core.plans.ops import RAGGED_DOT
from tests.cases import MATMUL, normal

X, W = normal(0, 4, 8), normal(1, 8, 2)


class Op(OpBase):
    def __init__(self, recipe=None, form="direct"):
        self.recipe, self.form = recipe, form


class Experts(Op):
    row = RAGGED_DOT


def test_the_recipe_in_use():
    mx, current = fp8.MXFP8BlockScaling(), fp8.Float8CurrentScaling()
    assert Op().recipe_in_use() == fp8.DelayedScaling()
    with fp8.autocast(recipe=mx):
        assert Op().recipe_in_use() == mx.gemms
        assert Op(current).recipe_in_use() == current
    with fp8.autocast(enabled=False):
        assert Op(current).recipe_in_use() is None


def test_without_fp8_no_state_is_asked_for():
    def states(recipe):
        raise AssertionError

    out = Op().compute(None, states, tuple, X, W, MATMUL)
    np.testing.assert_array_equal(out, X @ W)


def test_states_are_those_of_the_recipe_in_use():
    seen = []

    def states(recipe):
        seen.append(recipe)
        return STATELESS

    recipe = fp8.Float8CurrentScaling()
    out = Op().compute(recipe, states, tuple, X, W, MATMUL)
    assert seen == [recipe]
    assert 0 < np.max(np.abs(out - X @ W)) < 0.5


@pytest.mark.parametrize("op", [Op(), Experts()])
def test_leaves_of_the_state(op):
    leading = (3,) if isinstance(op, Experts) else ()
    leaves = op.state_leaves(fp8.DelayedScaling(amax_history_len=5), (3, 8, 2))
    assert leaves == [
        leaf
        for role in ("input", "kernel", "output_grad")
        for shape in [leading if role == "kernel" else ()]
        for leaf in (
            StateLeaf(role, f"{role}_scale", (*shape, 1), 1.0),
            StateLeaf(role, f"{role}_amax_history", (*shape, 5), 0.0),
        )
    ]
    assert op.state_leaves(fp8.MXFP8BlockScaling(), (3, 8, 2)) == []


@pytest.mark.parametrize(
    ("op", "error", "message"),
    [
        (Op("MX"), TypeError, "recipe must be an instance"),
        (Op(form="fast"), ValueError, "form must be one of"),
    ],
)
def test_wrong_options(op, error, message):
    with pytest.raises(error, match=message):
        op.check_options()


def test_arrays_of_the_state_are_checked():
    for array in (jnp.ones(1), to_max_dtype(jnp.ones(1))):
        check_state_array(array, (1,), "a/scale", "Do this", "Do that.")
    with pytest.raises(TypeError, match=r"a/scale must be float32; got bfloat16\. Do this, or cast"):
        check_state_array(jnp.ones(1, jnp.bfloat16), (1,), "a/scale", "Do this", "Do that.")
    with pytest.raises(ValueError, match=r"a/scale has shape \(2,\), but the recipe needs \(1,\)"):
        check_state_array(jnp.ones(2), (1,), "a/scale", "Do this", "Do that.")
