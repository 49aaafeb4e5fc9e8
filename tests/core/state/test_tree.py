import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._compat.max_dtype import is_digest, to_digest, to_floats
from fp8flax._core import names
from fp8flax._core.state import tree

pytestmark = pytest.mark.optimized

OWG = names.OVERWRITE_WITH_GRADIENT


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


def with_state(state):
    return {"params": {"w": jnp.zeros((2,))}, OWG: {"Dense_0": {"Fp8DotGeneralOp_0": state}}}


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.usefixtures("stacking")
@pytest.mark.parametrize("cast", [lambda t: t, tree.merge_by_max], ids=["float32", "max"])
def test_a_good_new_state_is_taken(cast):
    new = with_state(op_state(0.25, [4.0, 2.0]))
    assert_trees_equal(tree.kept_tree(OLD, cast(new)), new)


@pytest.mark.usefixtures("stacking")
def test_several_states_are_those_of_one_alone():
    """States that are entered, left and kept together have the bits of each alone."""
    histories = np.random.default_rng(0).lognormal(size=(4, 2)).astype(np.float32)
    olds = {OWG: {f"op{i}": op_state(0.5, history) for i, history in enumerate(histories)}}

    def cotangents(entered):
        """Each tensor saw an amax of 8 and used a scale of 2, but for the third, which got no gradient."""
        return {
            name: {
                leaf: to_digest(*[jnp.full(x.shape, c) for c in (0.0 if name == "op2" else 2.0, 8.0, 0.0)])
                if leaf.endswith("_scale")
                else x
                for leaf, x in states.items()
            }
            for name, states in entered.items()
        }

    entered = tree.enter(olds)
    left = tree.leave(olds, {OWG: cotangents(entered[OWG])})
    for i, history in enumerate(histories):
        alone = {OWG: {"op": olds[OWG][f"op{i}"]}}
        digest = tree.enter(alone)[OWG]["op"]["kernel_scale"]
        np.testing.assert_array_equal(to_floats(entered[OWG][f"op{i}"]["kernel_scale"]), to_floats(digest))
        expected = op_state(0.5, history) if i == 2 else op_state(2.0, [8.0, history[0]])
        assert_trees_equal(left[OWG][f"op{i}"], expected)
    assert_trees_equal(tree.kept_tree(olds, left), left)


@pytest.mark.usefixtures("stacking")
@pytest.mark.parametrize("scale", [0.0, -np.inf, np.nan, np.inf])
def test_no_gradient_keeps_the_state(scale):
    kept = tree.kept_tree(OLD, with_state(op_state(scale, [0.0, 0.0])))
    assert_trees_equal(kept, with_state(op_state(0.5, [2.0, 1.0])))


@pytest.mark.usefixtures("stacking")
@pytest.mark.parametrize("amax", [np.inf, np.nan, -np.inf, -1.0])
def test_a_non_finite_amax_keeps_the_history(amax):
    kept = tree.kept_tree(OLD, with_state(op_state(0.25, [amax, 2.0])))
    assert_trees_equal(kept, with_state(op_state(0.25, [2.0, 1.0])))


@pytest.mark.usefixtures("stacking")
def test_stacked_layers_are_judged_one_by_one():
    old = {OWG: {"op": op_state(0.5, [2.0, 1.0], lead=(3,))}}
    new = jax.tree.map(lambda x: x, {OWG: {"op": op_state(0.25, [4.0, 2.0], lead=(3,))}})
    op = new[OWG]["op"]
    op["input_scale"] = op["input_scale"].at[1].set(0)
    op["kernel_amax_history"] = op["kernel_amax_history"].at[2, 0].set(jnp.inf)
    kept = tree.kept_tree(old, new)[OWG]["op"]
    np.testing.assert_array_equal(kept["input_scale"][:, 0], [0.25, 0.5, 0.25])
    np.testing.assert_array_equal(kept["input_amax_history"][:, 0], [4.0, 2.0, 4.0])
    np.testing.assert_array_equal(kept["kernel_scale"][:, 0], [0.25, 0.25, 0.25])
    np.testing.assert_array_equal(kept["kernel_amax_history"][:, 0], [4.0, 4.0, 2.0])


@pytest.mark.usefixtures("stacking")
@pytest.mark.parametrize("length", [1, 3])
def test_layers_stacked_along_another_axis(length):
    old = {OWG: {"op": op_state(0.5, [2.0] * length, lead=(2,))}}
    new = {OWG: {"op": op_state(0.25, [4.0] * length, lead=(2,))}}
    history = new[OWG]["op"]["input_amax_history"]
    new[OWG]["op"]["input_amax_history"] = history.at[1, 0].set(jnp.inf)
    transposed = [jax.tree.map(lambda x: x.T, tree) for tree in (old, new)]
    kept = jax.tree.map(lambda x: x.T, tree.kept_tree(*transposed))
    np.testing.assert_array_equal(kept[OWG]["op"]["input_amax_history"], [[4.0] * length, [2.0] * length])
    assert_trees_equal(kept, tree.kept_tree(old, new))


@pytest.mark.usefixtures("stacking")
@pytest.mark.parametrize("freeze", [lambda t: t, flax.core.freeze], ids=["dict", "FrozenDict"])
def test_only_scales_are_replaced(freeze):
    variables = freeze(OLD)
    entered = tree.merge_by_max(variables)
    before, after = jax.tree.leaves(variables), jax.tree.leaves(entered)
    assert [is_digest(x) for x in after] == [x.shape == (1,) for x in before]
    assert entered["params"]["w"] is OLD["params"]["w"]
    assert_trees_equal(tree.from_max(entered), variables)
    assert_trees_equal(tree.from_max(tree.merge_by_max(entered)), variables)


def test_state_is_found_by_its_names():
    """Also under other names than those of our ops, but not among parameters."""
    state = {"x_scale": jnp.ones((1,)), "x_amax_history": jnp.ones((4,))}
    foreign, alone = {"moment": jnp.ones((2,), jnp.bfloat16)}, {"x_scale": jnp.ones((2,))}
    variables = {"params": state, "mine": state, "alone": alone}
    entered = tree.merge_by_max(variables)
    assert is_digest(entered["mine"]["x_scale"])
    assert entered["params"] is not None
    assert not is_digest(entered["params"]["x_scale"])
    assert not is_digest(entered["alone"]["x_scale"])
    assert not tree.has_state({"params": state, "other": foreign})
    assert tree.has_state({OWG: alone})


def test_narrow_state_is_refused_by_name():
    bad = jax.tree.map(lambda x: x.astype(jnp.bfloat16), OLD)
    message = "Dense_0/Fp8DotGeneralOp_0/input_amax_history"
    with pytest.raises(TypeError, match=message):
        tree.merge_by_max(bad)
    with pytest.raises(TypeError, match=message):
        tree.kept_tree(OLD, bad)


def test_another_shape_is_refused_by_name():
    with pytest.raises(ValueError, match="input_amax_history"):
        tree.kept_tree(OLD, with_state(op_state(0.25, [4.0, 2.0, 1.0])))
