"""Models and ops of Flax's other API, and ops in the wrong place: the error says what to use."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx

X = jnp.ones((4, 16))
KEY = jax.random.key(0)


def linear(**fields):
    return nnx.Linear(16, 8, **fields, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("quantize_model", ()),
        ("report", (X,)),
        ("freeze", ({}, X)),
    ],
)
def test_a_model_of_the_other_api(function, args):
    with pytest.raises(TypeError, match=rf"use fp8flax\.nnx\.{function}"):
        getattr(fp8, function)(linear(), *args)
    with pytest.raises(TypeError, match=rf"use fp8flax\.{function}"):
        getattr(fp8nnx, function)(nn.Dense(8), *args[-1:])


@pytest.mark.parametrize("other", [nn.Dense(8), nn.Dense(8).init(KEY, X), X, nnx.Linear, optax.sgd(0.1)])
def test_something_else_where_an_nnx_model_is_wanted(other):
    match = r"model must be a flax\.nnx\.Module; got "
    if isinstance(other, nn.Module):
        match += r"Dense\..* It is a Linen module: (see|use) fp8flax\."
    grads = nnx.state(linear())
    for call in (
        lambda: fp8nnx.Optimizer(other, optax.sgd(0.1)),
        lambda: fp8nnx.Optimizer(linear(), optax.sgd(0.1)).update(other, grads),
        lambda: fp8nnx.overwrite_state(other, grads),
        lambda: fp8nnx.overwrite_state(other, other),
        lambda: fp8nnx.accumulate_gradients(lambda model, x: 0.0)(other, X),
        lambda: fp8nnx.calibrate(lambda model, x: model(x), other, [X]),
        lambda: fp8nnx.check_state(other),
    ):
        with pytest.raises(TypeError, match=match):
            call()


def test_an_optimizer_that_is_not_called():
    layer = nn.Dense(8)
    with pytest.raises(TypeError, match=r"optax\.adam\(1e-3\)"):
        fp8.TrainState.create(apply_fn=layer.apply, params=layer.init(KEY, X), tx=optax.adam)
    for args, got in (((linear(), optax.adam), "adam"), ((optax.adam(1e-3), linear()), "type Linear")):
        with pytest.raises(TypeError, match=rf"optax\.adam\(1e-3\); .*{got}"):
            fp8nnx.Optimizer(*args)


def test_a_train_state_where_variables_are_wanted(tmp_path):
    op = partial(fp8.Fp8DotGeneralOp, recipe=fp8.Float8CurrentScaling())
    layer = nn.Dense(8, dot_general_cls=op)
    state = fp8.TrainState.create(apply_fn=layer.apply, params=layer.init(KEY, X), tx=optax.sgd(0.1))
    frozen, _ = fp8.freeze(layer, state.params, X)
    for call in (
        fp8.remove_fp8_state,
        fp8.statistics(lambda state: 0.0),
        lambda state: fp8.accumulate_gradients(lambda state, x: 0.0)(state, X),
        fp8.grad(lambda state: jnp.sum(state.apply_fn(state.params, X))),
        lambda state: fp8.save_safetensors(tmp_path / "model.safetensors", frozen, state),
    ):
        with pytest.raises(TypeError, match=r"Pass state\.params"):
            call(state)


@pytest.mark.parametrize("model", [nn.Dense(8), linear(), 3], ids=["Linen", "NNX", "none"])
def test_a_model_where_a_function_is_wanted(model):
    got = {nn.Dense: "Dense, a Linen module", nnx.Linear: "Linear, an NNX module", int: "int"}[type(model)]
    variables = {"params": {}, fp8.OVERWRITE_WITH_GRADIENT: {}}
    for name, call in (
        ("fun", lambda: fp8.calibrate(model, variables, [X])),
        ("f", lambda: fp8nnx.calibrate(model, linear(), [X])),
        ("fun", lambda: fp8.statistics(model)),
        ("apply_fn", lambda: fp8.TrainState.create(apply_fn=model, params=variables, tx=optax.sgd(0.1))),
    ):
        with pytest.raises(TypeError, match=rf"^{name} .*{got}"):
            call()


def test_an_nnx_model_where_variables_are_wanted():
    with pytest.raises(TypeError, match="an NNX module"):
        fp8.calibrate(lambda model, x: model(x), linear(), [X])


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (fp8.DelayedScaling(), r"DelayedScaling\.$"),
        (nn.Dense, "Pass an instance, not the class"),
        (linear(), r"Linear\. It is an NNX module: see fp8flax\.nnx\."),
    ],
)
def test_something_else_where_a_linen_model_is_wanted(model, got):
    with pytest.raises(TypeError, match=f"model .*{got}"):
        fp8.add_fp8_state(nn.Dense(8).init(KEY, X), model, X)


def test_a_linen_model_to_calibrate():
    with pytest.raises(TypeError, match=r"use fp8flax\.calibrate"):
        fp8nnx.calibrate(nn.Dense(8).apply, nn.Dense(8), [X])


def test_a_recipe_is_not_callable():
    """Flax wraps callable attributes of a module's class as methods, so a recipe must be none."""

    class Model(nn.Module):
        recipe = fp8.Float8CurrentScaling()

        def __call__(self, x):
            return self.recipe

    assert Model().apply({}, X) == fp8.Float8CurrentScaling()
    with pytest.raises(TypeError, match="not callable"):
        linear(dot_general=fp8.DelayedScaling())(X)


MODEL8 = fp8.quantize_model(nn.Dense(8), fp8.Float8CurrentScaling(), include="")


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        (
            (),
            "needs sample inputs",
        ),
        (((4, 16),), r"ShapeDtypeStruct\(\(4, 16\)"),
    ],
)
def test_no_inputs_or_only_their_shape(inputs, match):
    model = fp8nnx.quantize_model(linear(), include="")
    for call in (
        lambda: fp8.report(MODEL8, *inputs),
        lambda: fp8.add_fp8_state({"params": {}}, MODEL8, *inputs),
        lambda: fp8nnx.report(model, *inputs),
        lambda: fp8nnx.freeze(model, *inputs),
    ):
        with pytest.raises(TypeError, match=match):
            call()


def test_parameters_where_variables_are_wanted():
    params = MODEL8.init(KEY, X)["params"]
    for call in (lambda: fp8.freeze(MODEL8, params, X), lambda: fp8.add_fp8_state(params, MODEL8, X)):
        with pytest.raises(ValueError, match="collection 'params'"):
            call()


def test_a_frozen_model_where_one_in_training_is_wanted():
    frozen, variables = fp8.freeze(MODEL8, MODEL8.init(KEY, X), X)
    op = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
    frozen_nnx = fp8nnx.freeze(linear(dot_general=op), X)
    for call in (lambda: fp8.freeze(frozen, variables, X), lambda: fp8nnx.freeze(frozen_nnx, X)):
        with pytest.raises(ValueError, match="it is frozen already"):
            call()
    for call in (
        lambda: fp8.calibrate(frozen.apply, variables, [X]),
        lambda: fp8nnx.calibrate(lambda model, x: model(x), frozen_nnx, [X]),
    ):
        with pytest.raises(ValueError, match="before freeze"):
            call()
    with pytest.raises(TypeError, match="not from freeze"):
        fp8.report(frozen, X)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: fp8.pmean_gradients("data", {}), "The order is pmean_gradients"),
        (lambda: fp8.load_into("file", {}), "The order is load_into"),
        (lambda: fp8nnx.overwrite_state(nnx.state(linear()), linear()), "model first"),
        (
            lambda: fp8nnx.accumulate_gradients(lambda model, x: 0.0)(X, linear()),
            "The order is",
        ),
    ],
)
def test_swapped_arguments(call, match):
    with pytest.raises(TypeError, match=match):
        call()


def test_an_instance_where_a_layer_takes_the_class():
    layer = nn.Dense(8, dot_general_cls=fp8.Fp8DotGeneralOp())
    with pytest.raises(TypeError, match="dot_general_cls="):
        layer.init(KEY, X)


@pytest.mark.parametrize(
    "op", [fp8nnx.Fp8DotGeneralOp, fp8nnx.Fp8DotGeneralOp()], ids=["class", "instance"]
)
def test_an_nnx_op_in_a_linen_layer(op):
    field = "dot_general_cls" if isinstance(op, type) else "dot_general"
    with pytest.raises(TypeError, match="the Linen op"):
        nn.Dense(8, **{field: op}).init(KEY, X)


def test_an_nnx_layer_in_a_linen_model():
    """The bridge keeps the state of NNX modules, and stays allowed."""
    model = nnx.bridge.to_linen(nnx.Linear, 16, 8, dot_general=fp8nnx.Fp8DotGeneralOp())
    variables = model.init(KEY, X)
    assert model.apply(variables, X).shape == (4, 8)


def test_a_linen_op_in_an_nnx_layer():
    with pytest.raises(TypeError, match=r"dot_general=fp8flax\.nnx\.Fp8DotGeneralOp"):
        linear(dot_general=fp8.Fp8DotGeneralOp())(X)
