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


@functools.cache
def params():
    return MODEL8.init(KEY, X)["params"]


RECIPE = fp8.Float8CurrentScaling()
OP = fp8.Fp8DotGeneralOp
MASKS = r"variables\['params'\] alone, so make masks and labels"


@functools.cache
def frozen():
    return fp8.freeze(MODEL8, {"params": params()}, X)


def create(apply_fn=LAYER.apply, variables=None, tx=None):
    variables = {"params": params()} if variables is None else variables
    return fp8.TrainState.create(apply_fn=apply_fn, params=variables, tx=tx or optax.sgd(0.1))


def init(layer, x=X, **options):
    return jax.eval_shape(partial(layer.init, **options), KEY, x)


class Stack(nn.Module):
    """FP8 layers under an ``nn.vmap`` that names the given collections."""

    collections: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        axes = dict.fromkeys(self.collections, 0)
        stacked = nn.vmap(nn.Dense, variable_axes=axes, split_rngs={"params": True})
        return stacked(8, dot_general_cls=fp8.Fp8DotGeneralOp)(x)


MISTAKES = {
    "Linen for NNX": (lambda: fp8nnx.Optimizer(LAYER, optax.sgd(0.1)), "Dense"),
    "NNX for Linen": (lambda: fp8.add_fp8_state({"params": {}}, linear(), X), r"flax\."),
    "a class for a model": (lambda: fp8.add_fp8_state({"params": {}}, nn.Dense, X), "not the class"),
    "a model for a function": (lambda: fp8.calibrate(LAYER, {"params": {}, OWG: {}}, [X]), "Dense"),
    "an optimizer's function": (lambda: create(tx=optax.adam), r"optax\.adam\(1e-3\)"),
    "a train state for variables": (
        lambda: fp8.grad(lambda state: jnp.sum(state.apply_fn(state.params, X)))(create()),
        r"Pass state\.params",
    ),
    "no params": (lambda: create(variables={OWG: STATE}), "one dict of variables"),
    "params for variables": (lambda: fp8.freeze(MODEL8, params(), X), "collection 'params'"),
    "vmap without the state": (lambda: init(Stack(("params",))), "only init makes it.*variable_axes"),
    "nothing to freeze": (lambda: fp8.freeze(LAYER, {"params": params()}, X), r"fp8flax\.report"),
    "a callable for a pattern": (lambda: fp8.quantize_model(LAYER, exclude=print), "regular expressions"),
    "two recipes": (lambda: fp8.quantize_model(LAYER, RECIPE, recipe=RECIPE), "given once"),
    "frozen twice": (lambda: fp8.freeze(*frozen(), X), "frozen already"),
    "frozen too early": (lambda: fp8.calibrate(frozen()[0].apply, frozen()[1], [X]), "before freeze"),
    "a class for an op": (lambda: linear(dot_general=fp8nnx.Fp8DotGeneralOp)(X), "takes an instance"),
    "a class for an op, Linen": (lambda: init(nn.Dense(8, dot_general=OP)), "dot_general_cls"),
    "a partial for an op": (lambda: init(nn.Dense(8, dot_general=partial(OP, recipe=CURRENT))), "_cls"),
    "an op for a class": (lambda: init(nn.Dense(8, dot_general_cls=OP())), "=Fp8DotGeneralOp,"),
    "a convolution for a class": (
        lambda: init(nn.Conv(8, 3, conv_general_dilated_cls=fp8.Fp8ConvGeneralDilatedOp())),
        "without operands",
    ),
    "masks of all variables": (lambda: create(tx=optax.masked(optax.adam(1), {"params": 1})), MASKS),
    "labels of all variables": (
        lambda: create(tx=optax.partition({"a": optax.adam(1)}, {"params": {"kernel": "a"}})),
        MASKS,
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_what_to_use(name):
    call, match = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, UserWarning), match=match):
        call()


def test_what_stays_allowed():
    class Module:
        """A function, which is no model of Flax."""

        def __call__(self, variables, x):
            return x

    create(apply_fn=Module())
    assert OWG in init(Stack(("params", OWG)))  # the advice of the error above
    bridged = nnx.bridge.to_linen(nnx.Linear, 16, 8, dot_general=fp8nnx.Fp8DotGeneralOp())
    assert bridged.apply(bridged.init(KEY, X), X).shape == (4, 8)


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
