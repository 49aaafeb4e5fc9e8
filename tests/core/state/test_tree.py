"""States of several tensors: how they enter and leave a gradient, and what a step may make of them."""

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._compat.max_dtype import to_floats
from fp8flax._core import names
from fp8flax._core.state import tree
from fp8flax._core.state.meta import fp8_meta, pack_meta
from fp8flax._train.check import checked_next_state
from tests.cases import OWG, assert_trees_equal

pytestmark = pytest.mark.optimized


def is_meta(x):
    return x.dtype == fp8_meta


def op_state(scale, history, lead=()):
    shape = (*lead, len(history))
    return {
        f"{role}{suffix}": value
        for role in names.ROLES
        for suffix, value in (
            ("_scale", jnp.full((*lead, 1), scale)),
            ("_amax_history", jnp.broadcast_to(jnp.float32(history), shape)),
        )
    }


OLD = {"params": {"w": jnp.ones((2,))}, OWG: {"Dense_0": {"Fp8DotGeneralOp_0": op_state(0.5, [2.0, 1.0])}}}


@pytest.mark.usefixtures("stacking")
def test_several_states_are_those_of_one_alone():
    """States that are entered, left and checked together have the bits of each alone."""
    histories = np.random.default_rng(0).lognormal(size=(4, 2)).astype(np.float32)
    olds = {OWG: {f"op{i}": op_state(0.5, history) for i, history in enumerate(histories)}}

    def cotangent(path, x):
        """Each tensor saw an amax of 8 and used a scale of 2, but for the third, which got no gradient."""
        scale = 0.0 if path[1].key == "op2" else 2.0
        return pack_meta(*(jnp.full(x.shape, c) for c in (scale, 8.0, 0.0))) if is_meta(x) else x

    entered, leave = tree.enter(olds)
    left = leave(jax.tree_util.tree_map_with_path(cotangent, entered))
    for i, history in enumerate(histories):
        alone, _ = tree.enter({OWG: {"op": olds[OWG][f"op{i}"]}})
        for name, leaf in alone[OWG]["op"].items():
            np.testing.assert_array_equal(to_floats(entered[OWG][f"op{i}"][name]), to_floats(leaf))
        expected = op_state(0.5, history) if i == 2 else op_state(2.0, [8.0, history[0]])
        assert_trees_equal(left[OWG][f"op{i}"], expected)
    assert_trees_equal(checked_next_state(olds, left), left)


def test_what_is_kept():
    """The state if no gradient arrived, and the history if the newest amax is not a finite magnitude."""
    bad_scales, bad_amaxes = [0.0, -np.inf, np.nan, np.inf], [np.inf, np.nan, -np.inf]
    cases = [(0.25, 4.0), *((scale, 4.0) for scale in bad_scales), *((0.25, amax) for amax in bad_amaxes)]
    new = {f"op{i}": op_state(scale, [amax, 2.0]) for i, (scale, amax) in enumerate(cases)}
    olds = {OWG: dict.fromkeys(new, op_state(0.5, [2.0, 1.0]))}
    kept = checked_next_state(olds, {OWG: new})[OWG]
    states = [
        op_state(0.25, [4.0, 2.0]),
        *[op_state(0.5, [2.0, 1.0])] * 4,
        *[op_state(0.25, [2.0, 1.0])] * 3,
    ]
    assert_trees_equal(list(kept.values()), states)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_subnormal_amax_is_that_of_a_step(wrap):
    """It enters a history and moves on in it, to the bit; the scale stays until there is another amax."""
    for history, new_scale, newest in (
        ([2.0, 0.0], 2 / 448, 1e-40),
        ([1e-40, 0.0], 0.5, 4.0),
        ([1e-40], 0.5, 4.0),
    ):
        new = {OWG: {"op": op_state(new_scale, [newest, *history][: len(history)])}}
        kept = wrap(checked_next_state)({OWG: {"op": op_state(0.5, history)}}, new)
        bits = (jax.tree.map(lambda x: np.asarray(x).tobytes(), tree) for tree in (kept, new))
        assert_trees_equal(*bits)


@pytest.mark.usefixtures("stacking")
@pytest.mark.parametrize("length", [1, 3])
def test_stacked_layers(length):
    """Each layer is kept by itself, also if the layers are stacked along another axis."""
    old = {OWG: {"op": op_state(0.5, [2.0] * length, lead=(3,))}}
    new = {OWG: {"op": op_state(0.25, [4.0] + [2.0] * (length - 1), lead=(3,))}}
    op = new[OWG]["op"]
    op["input_scale"] = op["input_scale"].at[1].set(0)
    op["kernel_amax_history"] = op["kernel_amax_history"].at[2, 0].set(jnp.inf)
    transposed = [jax.tree.map(lambda x: x.T, tree) for tree in (old, new)]
    kept = jax.tree.map(lambda x: x.T, checked_next_state(*transposed))[OWG]["op"]
    np.testing.assert_array_equal(kept["input_scale"][:, 0], [0.25, 0.5, 0.25])
    np.testing.assert_array_equal(kept["input_amax_history"][:, 0], [4.0, 2.0, 4.0])
    np.testing.assert_array_equal(kept["kernel_scale"][:, 0], [0.25, 0.25, 0.25])
    np.testing.assert_array_equal(kept["kernel_amax_history"][:, 0], [4.0, 4.0, 2.0])
    assert_trees_equal(kept, checked_next_state(old, new)[OWG]["op"])


@pytest.mark.parametrize("freeze", [lambda t: t, flax.core.freeze], ids=["dict", "FrozenDict"])
def test_only_scales_are_replaced(freeze):
    variables = freeze(OLD)
    entered = tree.merge_by_max(variables)
    before, after = jax.tree.leaves(variables), jax.tree.leaves(entered)
    assert [is_meta(x) for x in after] == [x.shape == (1,) for x in before]
    assert entered["params"]["w"] is OLD["params"]["w"]
    assert_trees_equal(tree.from_max(entered), variables)
    assert_trees_equal(tree.from_max(tree.merge_by_max(entered)), variables)


def test_state_is_found_by_its_names():
    """Also under other names than those of our ops, but not among parameters."""
    state = {"x_scale": jnp.ones((1,)), "x_amax_history": jnp.ones((4,))}
    alone = {"x_scale": jnp.ones((2,), jnp.bfloat16), "moment": 3.0}
    entered = tree.merge_by_max({"params": state, "mine": state, OWG: alone})
    assert is_meta(entered["mine"]["x_scale"])
    assert not is_meta(entered["params"]["x_scale"])
    assert entered[OWG] is not alone
    assert entered[OWG] == alone
    assert not tree.has_state({"params": state, OWG: alone})
    assert tree.has_state({"params": {OWG: state}})


def test_wrong_state_is_refused_by_name():
    name = "Dense_0/Fp8DotGeneralOp_0/input"
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), OLD)
    with pytest.raises(TypeError, match=name):
        tree.merge_by_max(narrow)
    with pytest.raises(TypeError, match=name):
        checked_next_state(OLD, narrow)
    longer = {**OLD, OWG: {"Dense_0": {"Fp8DotGeneralOp_0": op_state(0.25, [4.0, 2.0, 1.0])}}}
    with pytest.raises(ValueError, match="other shapes"):
        checked_next_state(OLD, longer)
    with pytest.raises(ValueError, match=f"{name}_scale has shape"):
        tree.enter(jax.tree.map(lambda x: x[0] if x.shape == (1,) else x, OLD))
