"""The part of ops that Linen and NNX share, with an op of neither."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax._compat.max_dtype import to_max_dtype
from fp8flax._core.op_base import OpBase, StateLeaf
from fp8flax._core.plans.ops import DOT_GENERAL, RAGGED_DOT
from tests.cases import MATMUL, normal

X, W = normal(0, 4, 8), normal(1, 8, 2)


class Op(OpBase):
    row = DOT_GENERAL
    _dtype_advice, _shape_advice = "Do this", "Do that."

    def __init__(self, recipe=None, form="direct", value=None):
        self.recipe, self.form, self.value, self.seen = recipe, form, value, []

    def __call__(self, *args):
        return self._multiplier()(*args)

    def _value(self, leaf):
        self.seen.append(leaf)
        value = jnp.full(leaf.shape, leaf.fill) if self.value is None else self.value
        return value, "a/scale"


class Experts(Op):
    row = RAGGED_DOT


def test_the_recipe_in_use():
    mx, current = fp8.MXFP8BlockScaling(), fp8.Float8CurrentScaling()
    assert Op()._recipe_in_use() == fp8.DelayedScaling()
    with fp8.autocast(recipe=mx):
        assert Op()._recipe_in_use() == mx.gemms
        assert Op(current)._recipe_in_use() == current
    with fp8.autocast(enabled=False):
        assert Op(current)._recipe_in_use() is None


def test_without_fp8_no_state_is_asked_for():
    op = Op()
    with fp8.autocast(enabled=False):
        np.testing.assert_array_equal(op(X, W, MATMUL), X @ W)
    assert op.seen == []


def test_states_are_those_of_the_recipe_in_use():
    op, exact = Op(), X @ W
    for recipe, number in ((fp8.Float8CurrentScaling(), 0), (fp8.DelayedScaling(), 6)):
        with fp8.autocast(recipe=recipe):
            out = op(X, W, MATMUL)
        assert len(op.seen) == number
        assert 0 < np.max(np.abs(out - exact)) < 0.5


def test_one_class_for_each_row():
    row = dataclasses.replace(DOT_GENERAL, name="OwnOp")
    assert Op._for_row(RAGGED_DOT) is Experts
    assert Op._for_row(row) is Op._for_row(row)
    assert (Op._for_row(row).__name__, Op._for_row(row).row) == ("OwnOp", row)
    assert Experts in Op._classes.values()
    assert Experts not in fp8.Fp8DotGeneralOp._classes.values()


@pytest.mark.parametrize("op", [Op(), Experts()])
def test_leaves_of_the_state(op):
    leading = (3,) if isinstance(op, Experts) else ()
    leaves = op._state_leaves(fp8.DelayedScaling(amax_history_len=5), (3, 8, 2))
    assert leaves == [
        leaf
        for role in ("input", "kernel", "output_grad")
        for shape in [leading if role == "kernel" else ()]
        for leaf in (
            StateLeaf(role, f"{role}_scale", (*shape, 1), 1.0),
            StateLeaf(role, f"{role}_amax_history", (*shape, 5), 0.0),
        )
    ]
    assert op._state_leaves(fp8.MXFP8BlockScaling(), (3, 8, 2)) == []


@pytest.mark.parametrize(
    ("op", "error", "message"),
    [
        (Op("MX"), TypeError, "recipe"),
        (Op(form="fast"), ValueError, "form must be one of"),
    ],
)
def test_wrong_options(op, error, message):
    with pytest.raises(error, match=message):
        op._check_options()


def test_arrays_of_the_state_are_checked():
    recipe = fp8.DelayedScaling(amax_history_len=1)
    for array in (jnp.ones(1), to_max_dtype(jnp.ones(1))):
        assert Op(value=array)._states(recipe).input.scale is array
    with pytest.raises(TypeError, match="a/scale"):
        Op(value=jnp.ones(1, jnp.bfloat16))._states(recipe)
    with pytest.raises(ValueError, match=r"a/scale .*\(2,\)"):
        Op(value=jnp.ones(2))._states(recipe)


@pytest.mark.parametrize("op", [fp8.Fp8DotGeneralOp, fp8nnx.Fp8DotGeneralOp])
def test_an_op_shows_what_users_need(op):
    ours = [cls for cls in op.__mro__ if cls.__module__.startswith("fp8flax")]
    shown = {name for cls in ours for name in vars(cls) if not name.startswith("_")}
    assert shown <= {"recipe", "form", "row", "default_recipe", "scope", "name", "parent"}
