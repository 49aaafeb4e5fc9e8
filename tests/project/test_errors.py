"""Likely mistakes raise errors that say what to do."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import fp8flax as fp8

KEY, X = jax.random.key(0), jnp.ones((2, 8))
OWG = fp8.OVERWRITE_WITH_GRADIENT


def traced(model, x, **options):
    return jax.eval_shape(partial(model.init, **options), KEY, x)


@pytest.fixture(scope="module")
def dense():
    layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
    state = {"input_scale": jnp.ones(1), "input_amax_history": jnp.zeros(4)}
    return layer, {"params": {"kernel": X.T, "bias": X[0, :2]}, OWG: {"op": state}}


def test_train_state_without_parameters(dense):
    layer, variables = dense
    for params in ({OWG: variables[OWG]}, {OWG: variables[OWG], "weights": variables["params"]}):
        with pytest.raises(ValueError, match="no 'params'"):
            fp8.TrainState.create(apply_fn=layer.apply, params=params, tx=optax.sgd(1e-3))


@pytest.mark.parametrize("op", [fp8.Fp8DotGeneralOp, fp8.NANOOFp8DotGeneralOp, fp8.Fp8DirectDotGeneralOp])
def test_op_in_the_wrong_field(op):
    for given in (op, partial(op, recipe=fp8.DelayedScaling())):
        with pytest.raises(TypeError, match=f"{op.__name__} .*dot_general_cls="):
            traced(nn.Dense(4, dot_general=given), X)


def test_class_where_an_instance_is_needed():
    with pytest.raises(TypeError, match="conv_general_dilated_cls="):
        traced(nn.Conv(4, (1,), conv_general_dilated=fp8.Fp8ConvGeneralDilatedOp), X[None])
    with pytest.raises(TypeError, match=r"Fp8Einsum\(\)"):
        fp8.Fp8Einsum("ab,bc->ac", X, X.T)
    with pytest.raises(TypeError, match=r"Fp8RaggedDotOp\(\)"):
        fp8.Fp8RaggedDotOp(X, X[None].mT, jnp.array([2]))
    with pytest.raises(TypeError, match="Fp8DotGeneralOp"):
        traced(nn.Dense(4, dot_general_cls=fp8.Fp8Einsum), X)


@pytest.mark.parametrize(
    "make",
    [
        lambda v: optax.masked(optax.adam(1e-3), jax.tree.map(lambda _: True, v)),
        # Without the error these would train nothing, silently.
        lambda v: optax.masked(optax.adam(1e-3), lambda v: {k: k == "params" for k in v}),
        lambda v: optax.multi_transform(
            {"optimize": optax.adam(1e-3), "leave": optax.set_to_zero()},
            lambda v: {k: "optimize" if k == "params" else "leave" for k in v},
        ),
    ],
)
def test_masks_over_whole_variables(make, dense):
    layer, variables = dense
    create = partial(fp8.TrainState.create, apply_fn=layer.apply, tx=make(variables))
    with pytest.raises(ValueError, match="masks or labels"):
        create(params=variables)


@pytest.mark.parametrize(
    "tx",
    [
        optax.masked(optax.adam(1e-3), lambda params: {k: k == "kernel" for k in params}),
        # No parameter has this shape; the optimizer does not see the history that has it.
        optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.shape == (4,), p)),
    ],
)
def test_other_masks(tx, dense):
    layer, variables = dense
    state = fp8.TrainState.create(apply_fn=layer.apply, params=variables, tx=tx)
    expected = tx.init(variables["params"])
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(expected)


class Stack(nn.Module):
    """FP8 layers under an ``nn.vmap`` that names the given collections."""

    collections: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        axes = dict.fromkeys(self.collections, 0)
        stacked = nn.vmap(nn.Dense, variable_axes=axes, split_rngs={"params": True})
        return stacked(8, dot_general_cls=fp8.Fp8DotGeneralOp)(x)


def test_no_state_at_init_says_what_to_do():
    match = "init may not make this collection"
    with pytest.raises(fp8.MissingStateError, match=match):
        traced(Stack(("params",)), X)
    with pytest.raises(fp8.MissingStateError, match=match):
        traced(nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), X, mutable=["params"])
    # The advice of the message works.
    assert OWG in traced(Stack(("params", OWG)), X)


def test_freeze_with_inputs_does_not_ask_for_inputs():
    variables = nn.Dense(4).init(KEY, X)
    with pytest.raises(ValueError, match="fp8flax.report"):
        fp8.freeze(nn.Dense(4), variables, X)
    with pytest.raises(ValueError, match="Pass inputs"):
        fp8.freeze(nn.Dense(4), variables)
