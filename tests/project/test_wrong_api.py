"""Likely mistakes, as the other API of Flax or swapped arguments, raise errors that say what to use."""

import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx

X, KEY = jnp.ones((4, 16)), jax.random.key(0)
OWG, CURRENT = fp8.OVERWRITE_WITH_GRADIENT, fp8.Float8CurrentScaling()
LAYER = nn.Dense(8)
MODEL8 = fp8.quantize_model(LAYER, CURRENT, include="")
STATE = {"op": {"input_scale": jnp.ones(1), "input_amax_history": jnp.zeros(4)}}


def linear(**fields):
    return nnx.Linear(16, 8, **fields, rngs=nnx.Rngs(0))


def call_model(model, x):
    return model(x)


@functools.cache
def params():
    return MODEL8.init(KEY, X)["params"]


@functools.cache
def train_state():
    variables = {"params": params()}
    return fp8.TrainState.create(apply_fn=MODEL8.apply, params=variables, tx=optax.sgd(0.1))


@functools.cache
def frozen():
    return fp8.freeze(MODEL8, {"params": params()}, X)


@functools.cache
def frozen_nnx():
    return fp8nnx.freeze(linear(dot_general=fp8nnx.Fp8DotGeneralOp(recipe=CURRENT)), X)


def create(apply_fn=LAYER.apply, variables=None, tx=None):
    variables = {"params": params()} if variables is None else variables
    return fp8.TrainState.create(apply_fn=apply_fn, params=variables, tx=tx or optax.sgd(0.1))


def init(layer, x=X, **options):
    return jax.eval_shape(partial(layer.init, **options), KEY, x)


def with_op(op=fp8.Fp8DotGeneralOp):
    return nn.Dense(8, dot_general_cls=op)


class Stack(nn.Module):
    """FP8 layers under an ``nn.vmap`` that names the given collections."""

    collections: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        axes = dict.fromkeys(self.collections, 0)
        stacked = nn.vmap(nn.Dense, variable_axes=axes, split_rngs={"params": True})
        return stacked(8, dot_general_cls=fp8.Fp8DotGeneralOp)(x)


def of_every_nnx_function(other, match):
    """Returns cases in which something other than an NNX model is passed as the model."""
    calls = (
        lambda: fp8nnx.Optimizer(other, optax.sgd(0.1)),
        lambda: fp8nnx.Optimizer(linear(), optax.sgd(0.1)).update(other, nnx.state(linear())),
        lambda: fp8nnx.overwrite_state(other, nnx.state(linear())),
        lambda: fp8nnx.accumulate_gradients(lambda model, x: 0.0)(other, X),
    )
    return [(call, TypeError, match) for call in calls]


def of_a_model_for_a_function(model, got):
    """Returns cases in which a model is passed as the function."""
    calls = (
        lambda: fp8.calibrate(model, {"params": {}, OWG: {}}, [X]),
        lambda: fp8nnx.calibrate(model, linear(), [X]),
        lambda: fp8.statistics(model),
        lambda: create(model, {"params": {}, OWG: {}}),
    )
    return [(call, TypeError, got) for call in calls]


def of_inputs(inputs, match):
    """Returns cases in which a model is traced without inputs, or with their shape alone."""
    calls = (
        lambda: fp8.report(MODEL8, *inputs),
        lambda: fp8.add_fp8_state({"params": {}}, MODEL8, *inputs),
        lambda: fp8nnx.report(fp8nnx.quantize_model(linear(), include=""), *inputs),
        lambda: fp8nnx.freeze(fp8nnx.quantize_model(linear(), include=""), *inputs),
    )
    return [(call, TypeError, match) for call in calls]


MISTAKES = {
    "a model of the other API": [
        (lambda: fp8.freeze(LAYER, X), TypeError, r"variables must be the collections"),
        (lambda: fp8.calibrate(LAYER.apply, LAYER, [X]), TypeError, "variables must be the collections"),
        *of_every_nnx_function(LAYER, r"Dense\..* Linen module: (see|use) fp8flax\."),
        *of_every_nnx_function(X, r"flax\.nnx\.Module"),
    ],
    "no Linen model": [
        (lambda: fp8.add_fp8_state({"params": {}}, fp8.DelayedScaling(), X), TypeError, "DelayedScaling"),
        (lambda: fp8.add_fp8_state({"params": {}}, nn.Dense, X), TypeError, "not the class"),
        (lambda: fp8.add_fp8_state({"params": {}}, linear(), X), TypeError, r"flax\.linen"),
    ],
    "a model for a function": [
        *of_a_model_for_a_function(LAYER, "Dense"),
        *of_a_model_for_a_function(linear(), "Linear"),
        *of_a_model_for_a_function(3, "int"),
    ],
    "an op of the other API": [
        (lambda: init(with_op(fp8nnx.Fp8DotGeneralOp)), TypeError, "the Linen op"),
        (lambda: init(nn.Dense(8, dot_general=fp8nnx.Fp8DotGeneralOp())), TypeError, "the Linen op"),
    ],
    "an optimizer": [
        (lambda: create(tx=optax.adam), TypeError, r"optax\.adam\(1e-3\)"),
        (lambda: fp8nnx.Optimizer(linear(), optax.adam), TypeError, r"optax\.adam\(1e-3\); .*adam"),
        (lambda: fp8nnx.Optimizer(optax.adam(1e-3), linear()), TypeError, "type Linear"),
    ],
    "a train state for variables": [
        (call, TypeError, r"Pass state\.params")
        for call in (
            lambda: fp8.remove_fp8_state(train_state()),
            lambda: fp8.statistics(lambda state: 0.0)(train_state()),
            lambda: fp8.accumulate_gradients(lambda state, x: 0.0)(train_state(), X),
            lambda: fp8.grad(lambda state: jnp.sum(state.apply_fn(state.params, X)))(train_state()),
            lambda: fp8.save_safetensors("model.safetensors", frozen()[0], train_state()),
        )
    ],
    "other variables": [
        (lambda: create(variables={OWG: STATE}), ValueError, "no 'params'"),
        (lambda: fp8.freeze(MODEL8, params(), X), ValueError, "collection 'params'"),
        (lambda: fp8.add_fp8_state(params(), MODEL8, X), ValueError, "collection 'params'"),
        (lambda: init(Stack(("params",))), fp8.MissingStateError, "init may not make"),
        (lambda: init(with_op(), mutable=["params"]), fp8.MissingStateError, "init may not make"),
        (lambda: fp8.freeze(LAYER, {"params": params()}, X), ValueError, r"fp8flax\.report"),
        (lambda: fp8.freeze(LAYER, {"params": params()}), ValueError, "Pass inputs"),
    ],
    "a frozen model": [
        (lambda: fp8.freeze(*frozen(), X), ValueError, "frozen already"),
        (lambda: fp8nnx.freeze(frozen_nnx(), X), ValueError, "frozen already"),
        (lambda: fp8.calibrate(frozen()[0].apply, frozen()[1], [X]), ValueError, "before freeze"),
        (lambda: fp8nnx.calibrate(call_model, frozen_nnx(), [X]), ValueError, "before freeze"),
        (lambda: fp8.report(frozen()[0], X), TypeError, "not from freeze"),
    ],
    "inputs": [
        *of_inputs((), "needs sample inputs"),
        *of_inputs(((4, 16),), r"ShapeDtypeStruct\(\(4, 16\)"),
    ],
    "swapped arguments": [
        (lambda: fp8.load_into("file", {}), TypeError, "order is load_into"),
        (
            lambda: fp8nnx.accumulate_gradients(lambda model, x: 0.0)(X, linear()),
            TypeError,
            "order is",
        ),
    ],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_what_to_use(name):
    for call, error, match in MISTAKES[name]:
        with pytest.raises(error, match=match):
            call()


def test_what_stays_allowed():
    assert OWG in init(Stack(("params", OWG)))  # the advice of the error above
    bridged = nnx.bridge.to_linen(nnx.Linear, 16, 8, dot_general=fp8nnx.Fp8DotGeneralOp())
    assert bridged.apply(bridged.init(KEY, X), X).shape == (4, 8)


def test_a_recipe_as_an_attribute_of_a_module():
    """Flax wraps callable attributes of a module's class as methods, so a recipe must not be callable."""

    class Model(nn.Module):
        recipe = CURRENT

        def __call__(self, x):
            return self.recipe

    assert Model().apply({}, X) == CURRENT


@pytest.mark.parametrize(
    "tx",
    [
        optax.masked(optax.adam(1e-3), lambda params: {k: k == "kernel" for k in params}),
        # No parameter has this shape; the optimizer does not see the history that has it.
        optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.shape == (4,), p)),
    ],
)
def test_masks_of_parameters(tx):
    found = create(variables={"params": params(), OWG: STATE}, tx=tx)
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(tx.init(params()))
