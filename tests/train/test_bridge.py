import re
from functools import cache, partial

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from tests.cases import variables_of

OWG = fp8.OVERWRITE_WITH_GRADIENT
X = jnp.ones((2, 4))


class Stack(nn.Module):
    dot_general_cls: object
    layers: int
    features: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = nn.Dense(self.features, dot_general_cls=self.dot_general_cls, name=f"d{i}")(x)
        return x


def make(dot_general_cls, layers=2, features=4):
    return Stack(dot_general_cls, layers, features)


PLAIN, FP8 = make(None), make(fp8.Fp8DotGeneralOp)


@pytest.mark.parametrize("freeze", [lambda t: t, flax.core.freeze], ids=["dict", "FrozenDict"])
def test_there_and_back(freeze):
    variables = freeze(PLAIN.init(jax.random.key(0), X))
    with_state = fp8.add_fp8_state(variables, FP8, X)
    assert type(with_state) is type(variables)
    direct = freeze(FP8.init(jax.random.key(0), X))
    assert jax.tree.structure(with_state) == jax.tree.structure(direct)
    jax.tree.map(np.testing.assert_array_equal, with_state, direct)
    assert with_state["params"]["d0"]["kernel"] is variables["params"]["d0"]["kernel"]
    back = fp8.remove_fp8_state(with_state)
    assert type(back) is type(variables)
    jax.tree.map(np.testing.assert_array_equal, back, variables)
    np.testing.assert_allclose(FP8.apply(with_state, X), PLAIN.apply(back, X), rtol=0.2, atol=0.1)


def test_abstract_inputs_and_keywords():
    variables = PLAIN.init(jax.random.key(0), X)
    fp8.add_fp8_state(variables, FP8, jax.ShapeDtypeStruct(X.shape, X.dtype))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, *, deterministic):
            x = nn.Dropout(0.5, deterministic=deterministic)(x)
            return nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)(x)

    params = {"params": {"Dense_0": variables["params"]["d0"]}}
    assert OWG in fp8.add_fp8_state(params, Net(), X, deterministic=False)


def test_state_that_is_left_out_is_named():
    """The ops of Flax and of this package have the same state, but names of their own."""
    variables = make(fp8.Fp8DirectDotGeneralOp, layers=1).init(jax.random.key(0), X)
    with pytest.warns(UserWarning, match="d0/Fp8DirectDotGeneralOp_0"):
        fresh = fp8.add_fp8_state(variables, make(fp8.Fp8DotGeneralOp, layers=1), X)
    assert list(fresh[OWG]["d0"]) == ["Fp8DotGeneralOp_0"]


def test_state_that_fits_is_kept():
    variables = FP8.init(jax.random.key(0), X)
    grown = fp8.grad(lambda v: jnp.sum(FP8.apply(v, 3 * X)))(variables)[OWG]
    again = fp8.add_fp8_state({**variables, OWG: grown}, FP8, X)
    jax.tree.map(np.testing.assert_array_equal, again[OWG], grown)
    half = {**variables, OWG: {"d0": grown["d0"]}}
    filled = fp8.add_fp8_state(half, FP8, X)
    jax.tree.map(np.testing.assert_array_equal, filled[OWG]["d0"], grown["d0"])
    jax.tree.map(np.testing.assert_array_equal, filled[OWG]["d1"], variables[OWG]["d1"])


def with_length(length):
    return partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=length))


class Body(nn.Module):
    """A layer that runs beside the others of its stack, so its amaxes do not depend on their scales."""

    dot_general_cls: object

    @nn.compact
    def __call__(self, x, factor):
        return x, nn.Dense(4, dot_general_cls=self.dot_general_cls, name="layer")(x * factor)


def one_or_stacked(dot_general_cls, how, layers=3):
    """One layer, or layers whose state is stacked along the first or the last axis, by scan or by vmap."""
    if how == "one":
        return Body(dot_general_cls)
    split = {"params": True}
    if how == "scan":
        return nn.scan(Body, {"params": 0, OWG: 0}, split_rngs=split, length=layers)(dot_general_cls)
    return nn.vmap(Body, {"params": 0, OWG: -1}, split, in_axes=(None, 0))(dot_general_cls)


def factors(how, layers=3):
    return jnp.float32(1) if how == "one" else jnp.float32(2.0 ** np.arange(layers))


AMAXES = 2.0 ** np.array([3, 5, 1, 4, 2, 6, 0, 3])


@cache
def trained(how, length):
    """Returns the model, its parameters, a step ``(state, amax) -> state`` and the states of a run."""
    model, args = one_or_stacked(with_length(length), how), (X, factors(how))
    variables = variables_of(model, *args)

    @jax.jit
    def step(state, amax):
        def loss(state):
            params = jax.tree.map(lambda p: p * amax, variables["params"])
            _, y = model.apply({"params": params, OWG: state}, X * amax, factors(how))
            return jnp.sum(y) * amax

        return fp8.grad(loss)(state)

    states = [variables[OWG]]
    for amax in jnp.float32(AMAXES):
        states.append(step(states[-1], amax))
    return model, variables["params"], step, states


def migrate(state, how, length):
    model, params, _, _ = trained(how, length)
    return fp8.add_fp8_state({"params": params, OWG: state}, model, X, factors(how))[OWG]


def leaves_of(state):
    (leaves,) = state["layer"].values()
    return leaves


class TestAnotherLength:
    """A history of another length gives the run that had that length from its start."""

    @pytest.mark.parametrize(("old", "new", "steps"), [(5, 2, 8), (5, 1, 4), (2, 5, 4), (4, 5, 1)])
    def test_one_layer(self, old, new, steps):
        self.check("one", old, new, steps)

    @pytest.mark.parametrize(
        ("how", "old", "new"),
        [("scan", 2, 5), ("vmap", 5, 2)],
    )
    def test_stacked(self, how, old, new):
        self.check(how, old, new, 7)

    def check(self, how, old, new, steps):
        state = trained(how, old)[-1][steps]
        _, _, step, states = trained(how, new)
        migrated = migrate(state, how, new)
        for name, leaf in leaves_of(migrated).items():
            if name.endswith("_scale"):  # the scale of the last step, which had the old length
                np.testing.assert_array_equal(leaf, leaves_of(state)[name])
                continue
            expected = np.array(leaves_of(states[steps])[name])
            assert leaf.dtype == np.float32
            assert leaf.shape == expected.shape
            axis = expected.shape.index(new)
            past = np.moveaxis(expected, axis, 0)[1:]  # a view: from the oldest to the second newest
            past[: max(0, len(past) - (old - 1))] = 0  # amaxes that the old history had dropped
            np.testing.assert_array_equal(leaf, expected)
            assert np.all(np.take(np.asarray(leaf), 0, axis) > 0)
        if old >= min(new, steps):  # no amax was dropped, so the run continues like the other one
            ours, theirs = migrated, states[steps]
            for amax in (np.float32(2), np.float32(64)):
                ours, theirs = step(ours, amax), step(theirs, amax)
                jax.tree.map(np.testing.assert_array_equal, ours, theirs)

    def test_by_hand(self):
        state = {"layer": {"Fp8DotGeneralOp_0": dict(leaves_of(trained("one", 5)[-1][0]))}}
        leaves_of(state)["input_amax_history"] = jnp.array([4.0, 1.0, 2.0, 0.0, 3.0])
        leaves_of(state)["input_scale"] = jnp.array([0.25])
        leaves_of(state)["kernel_amax_history"] = jnp.zeros(0)  # no amax is known
        for length, expected in {1: [4], 2: [4, 3], 5: [4, 1, 2, 0, 3]}.items():
            migrated = leaves_of(migrate(state, "one", length))
            np.testing.assert_array_equal(migrated["input_amax_history"], np.float32(expected))
            np.testing.assert_array_equal(migrated["input_scale"], [0.25])
            np.testing.assert_array_equal(migrated["kernel_amax_history"], np.zeros(length))


def changed(state, name, function):
    """Returns the state of ``FP8`` with one leaf of its first layer changed."""
    (op,) = state["d0"]
    leaves = state["d0"][op]
    return {**state, "d0": {op: {**leaves, name: function(leaves[name])}}}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("input_scale", (2,)),
        ("kernel_amax_history", (2, 1024)),
        ("kernel_amax_history", ()),
    ],
)
def test_state_of_another_shape_is_refused(name, shape):
    variables = FP8.init(jax.random.key(0), X)
    bad = {**variables, OWG: changed(variables[OWG], name, lambda leaf: jnp.ones(shape))}
    message = rf"d0/Fp8DotGeneralOp_0/{name} has shape {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=message):
        fp8.add_fp8_state(bad, FP8, X)
    jax.tree.map(
        np.testing.assert_array_equal, fp8.add_fp8_state(fp8.remove_fp8_state(bad), FP8, X), variables
    )


@pytest.mark.parametrize(("layers", "length"), [(2, 5), (1, 1)])
def test_state_of_another_number_of_layers_is_refused(layers, length):
    model, params, _, _ = trained("scan", 5)
    foreign = one_or_stacked(with_length(length), "scan", layers)
    variables = {"params": params, OWG: variables_of(foreign, X, factors("scan", layers))[OWG]}
    message = rf"\({layers}, {length}\).*\(3, 5\)"
    with pytest.raises(ValueError, match=message):
        fp8.add_fp8_state(variables, model, X, factors("scan"))


def test_boxed_parameters():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = nn.Dense(4, kernel_init=init, dot_general_cls=fp8.Fp8DotGeneralOp)
    boxed = model.init(jax.random.key(0), X)
    for params in (boxed["params"], nn.meta.unbox(boxed["params"])):
        assert OWG in fp8.add_fp8_state({"params": params}, model, X)


def test_stacked_layers():
    model, params, _, states = trained("scan", 5)
    result = fp8.add_fp8_state({"params": params}, model, X, factors("scan"))
    jax.tree.map(np.testing.assert_array_equal, result, {"params": params, OWG: states[0]})


def test_errors():
    variables = PLAIN.init(jax.random.key(0), X)
    assert fp8.add_fp8_state(variables, PLAIN, X) is variables
    with pytest.raises(ValueError, match=r"\['bias'\] .* missing"):
        fp8.add_fp8_state(variables, make(fp8.Fp8DotGeneralOp, layers=3), X)
    with pytest.raises(ValueError, match="no such parameter"):
        fp8.add_fp8_state(variables, make(fp8.Fp8DotGeneralOp, layers=1), X)
    with pytest.raises(ValueError, match=r"\(4,\).*\(5,\)"):
        fp8.add_fp8_state(variables, make(fp8.Fp8DotGeneralOp, features=5), X)
