import re
from functools import partial

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8flax as fp8
from tests.cases import OWG, assert_trees_equal, variables_of
from tests.train.net import MODEL, Net, Op, mse, op_of, trained
from tests.train.net import X as SAMPLES

X = jnp.ones((2, 4))
PLAIN, FP8 = Net(None), Net()
STATE = partial(fp8.TrainState.create, apply_fn=None, tx=optax.sgd(0.1))


@pytest.mark.parametrize("freeze", [lambda t: t, flax.core.freeze], ids=["dict", "FrozenDict"])
def test_there_and_back(freeze):
    variables = freeze(PLAIN.init(jax.random.key(0), X))
    with_state = fp8.add_fp8_state(variables, FP8, X)
    assert type(with_state) is type(variables)
    direct = freeze(FP8.init(jax.random.key(0), X))
    assert_trees_equal(with_state, direct)
    assert with_state["params"]["first"]["kernel"] is variables["params"]["first"]["kernel"]
    back = fp8.remove_fp8_state(with_state)
    assert type(back) is type(variables)
    assert_trees_equal(back, variables)
    np.testing.assert_allclose(FP8.apply(with_state, X), PLAIN.apply(back, X), rtol=0.2, atol=0.1)


def test_abstract_inputs_and_keywords():
    variables = PLAIN.init(jax.random.key(0), X)
    fp8.add_fp8_state(variables, FP8, jax.ShapeDtypeStruct(X.shape, X.dtype))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, *, deterministic):
            x = nn.Dropout(0.5, deterministic=deterministic)(x)
            return nn.Dense(8, dot_general_cls=fp8.Fp8DotGeneralOp)(x)

    params = {"params": {"Dense_0": variables["params"]["first"]}}
    assert OWG in fp8.add_fp8_state(params, Net(), X, deterministic=False)


def test_state_that_is_left_out_is_named():
    """The ops of Flax and of this package have the same state, but names of their own."""
    variables = Net(fp8.Fp8DirectDotGeneralOp).init(jax.random.key(0), X)
    with pytest.warns(UserWarning, match="first/Fp8DirectDotGeneralOp_0"):
        fresh = fp8.add_fp8_state(variables, FP8, X)
    assert list(fresh[OWG]["first"]) == ["Fp8DotGeneralOp_0"]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_stack_of_one_layer_and_a_history_of_one_amax(axis):
    """Of two axes of size 1, the one that becomes longer holds the past amaxes."""

    class Layer(nn.Module):
        length: int

        @nn.compact
        def __call__(self, x, _=None):
            recipe = fp8.DelayedScaling(amax_history_len=self.length)
            return nn.Dense(4, dot_general_cls=partial(Op, recipe=recipe))(x), None

    axes = {"params": 0, OWG: axis}
    stack = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=1)
    for old, new in ((1, 3), (3, 1)):
        found = fp8.add_fp8_state(variables_of(stack(old), X), stack(new), X)
        assert_trees_equal(found[OWG], variables_of(stack(new), X)[OWG])


IN_HOST_MEMORY = {
    "value_and_grad": (jax.jit(fp8.value_and_grad(mse)), SAMPLES),
    "check_state": (lambda v: fp8.check_state(v, before=trained(1)),),
    "check_state, before": (lambda v: fp8.check_state(trained(3), before=v),),
    "add_fp8_state": (fp8.add_fp8_state, Net(partial(Op, recipe=fp8.DelayedScaling())), SAMPLES),
    "apply_gradients": (jax.jit(lambda v: STATE(params=trained(1)).apply_gradients(grads=v).params),),
    "of apply_gradients": (lambda v: STATE(params=v).apply_gradients(grads=trained(3)).params,),
    "calibrate": (lambda v: fp8.calibrate(MODEL.apply, v, [SAMPLES]),),
    "freeze": (lambda v: fp8.freeze(MODEL, v, SAMPLES)[1],),
    "apply": (MODEL.apply, SAMPLES),
}


@pytest.mark.parametrize("name", IN_HOST_MEMORY)
def test_state_in_the_memory_of_the_host(name):
    """JAX does not compute there. Functions of variables do what they do with state elsewhere."""
    trained(3)  # not first under jit
    use, *inputs = IN_HOST_MEMORY[name]
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    variables = {**trained(2), OWG: jax.device_put(trained(2)[OWG], host)}
    assert_trees_equal(use(variables, *inputs), use(trained(2), *inputs))


def test_state_that_fits_is_kept():
    variables = FP8.init(jax.random.key(0), X)
    grown = fp8.grad(lambda v: jnp.sum(FP8.apply(v, 3 * X)))(variables)[OWG]
    again = fp8.add_fp8_state({**variables, OWG: grown}, FP8, X)
    assert_trees_equal(again[OWG], grown)
    half = {**variables, OWG: {"first": grown["first"]}}
    filled = fp8.add_fp8_state(half, FP8, X)
    assert_trees_equal(filled[OWG], {"first": grown["first"], "second": variables[OWG]["second"]})


def stacked(length, how, layers=3):
    """Returns one layer, or layers whose state is stacked along the first or the last axis."""
    op = partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=length))
    if how == "one":
        return nn.Dense(4, dot_general_cls=op)
    axes = {"params": 0, OWG: 0 if how == "first" else -1}
    many = nn.vmap(nn.Dense, axes, {"params": True}, in_axes=None, axis_size=layers)
    return many(4, dot_general_cls=op)


def resized(history, length, axis=-1):
    """Returns a history of another length, by NumPy: the newest amax comes first, then the oldest ones."""
    in_order = np.roll(np.moveaxis(history, axis, -1), -1, -1)[..., -length:]
    zeros = np.zeros((*in_order.shape[:-1], length - in_order.shape[-1]), np.float32)
    return np.moveaxis(np.roll(np.concatenate([zeros, in_order], -1), 1, -1), -1, axis)


class TestAnotherLength:
    """A history of another length is the one that a run with that length would have."""

    @pytest.mark.parametrize(
        ("how", "old", "new"),
        [("one", 5, 2), ("one", 5, 1), ("one", 2, 5), ("first", 2, 5), ("first", 3, 1), ("last", 5, 2)],
    )
    def test_all_leaves(self, how, old, new):
        before, after = stacked(old, how), stacked(new, how)
        variables, rng = before.init(jax.random.key(0), X), np.random.default_rng(0)
        state = jax.tree.map(lambda leaf: np.exp2(rng.integers(-4, 5, leaf.shape, np.int8)), variables[OWG])
        state = jax.tree.map(np.float32, state)
        found = fp8.add_fp8_state({**variables, OWG: state}, after, X)[OWG]
        for name, leaf in found["Fp8DotGeneralOp_0"].items():
            expected = state["Fp8DotGeneralOp_0"][name]
            if name.endswith("history"):
                expected = resized(expected, new, 0 if how == "last" else -1)
            assert leaf.dtype == np.float32
            np.testing.assert_array_equal(leaf, expected)

    def test_by_hand(self):
        variables = stacked(5, "one").init(jax.random.key(0), X)
        state = variables[OWG]["Fp8DotGeneralOp_0"]
        state["input_amax_history"] = jnp.array([4.0, 1.0, 2.0, 0.0, 3.0])
        state["input_scale"] = jnp.array([0.25])
        state["kernel_amax_history"] = jnp.zeros(0)  # no amax is known
        for length, expected in {1: [4], 2: [4, 3], 5: [4, 1, 2, 0, 3], 6: [4, 0, 1, 2, 0, 3]}.items():
            migrated = fp8.add_fp8_state(variables, stacked(length, "one"), X)[OWG]["Fp8DotGeneralOp_0"]
            np.testing.assert_array_equal(migrated["input_amax_history"], np.float32(expected))
            np.testing.assert_array_equal(migrated["input_scale"], [0.25])
            np.testing.assert_array_equal(migrated["kernel_amax_history"], np.zeros(length))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("input_scale", (2,)), ("kernel_amax_history", (2, 4)), ("kernel_amax_history", ())],
)
def test_state_of_another_shape_is_refused(name, shape):
    variables, bad = FP8.init(jax.random.key(0), X), FP8.init(jax.random.key(0), X)
    op_of(bad)[name] = jnp.ones(shape)
    message = rf"first/Fp8DotGeneralOp_0/{name} has shape {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=message):
        fp8.add_fp8_state(bad, FP8, X)
    assert_trees_equal(fp8.add_fp8_state(fp8.remove_fp8_state(bad), FP8, X), variables)


def test_state_that_was_cast_is_refused():
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), FP8.init(jax.random.key(0), X))
    with pytest.raises(TypeError, match="first/Fp8DotGeneralOp_0/input_.* must be float32"):
        fp8.add_fp8_state(narrow, FP8, X)


@pytest.mark.parametrize(("layers", "length"), [(2, 5), (1, 1)])
def test_state_of_another_number_of_layers_is_refused(layers, length):
    model = stacked(5, "first")
    variables = model.init(jax.random.key(0), X)
    foreign = stacked(length, "first", layers).init(jax.random.key(0), X)[OWG]
    with pytest.raises(ValueError, match=rf"\({layers}, {length}\).*\(3, 5\)"):
        fp8.add_fp8_state({**variables, OWG: foreign}, model, X)
    result = fp8.add_fp8_state({"params": variables["params"]}, model, X)
    assert_trees_equal(result, variables)


def test_a_model_that_needs_no_state():
    variables = PLAIN.init(jax.random.key(0), X)
    assert fp8.add_fp8_state(variables, PLAIN, X) is variables
