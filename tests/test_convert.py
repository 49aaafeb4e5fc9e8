from functools import partial

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8

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


def test_state_that_fits_is_kept():
    variables = FP8.init(jax.random.key(0), X)
    grown = fp8.grad(lambda v: jnp.sum(FP8.apply(v, 3 * X)))(variables)[OWG]
    again = fp8.add_fp8_state({**variables, OWG: grown}, FP8, X)
    jax.tree.map(np.testing.assert_array_equal, again[OWG], grown)
    half = {**variables, OWG: {"d0": grown["d0"]}}
    filled = fp8.add_fp8_state(half, FP8, X)
    jax.tree.map(np.testing.assert_array_equal, filled[OWG]["d0"], grown["d0"])
    jax.tree.map(np.testing.assert_array_equal, filled[OWG]["d1"], variables[OWG]["d1"])


def test_nothing_is_computed_and_other_collections_stay():
    variables = {**PLAIN.init(jax.random.key(0), X), "batch_stats": {"mean": jnp.ones((3,))}}
    result = fp8.add_fp8_state(variables, FP8, X)
    assert result["batch_stats"] is variables["batch_stats"]


def test_state_that_does_not_fit():
    variables = FP8.init(jax.random.key(0), X)
    narrow = {**variables, OWG: jax.tree.map(lambda s: s.astype(jnp.bfloat16), variables[OWG])}
    with pytest.raises(TypeError, match="must be float32; got bfloat16"):
        fp8.add_fp8_state(narrow, FP8, X)
    short = make(partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=3)))
    refilled = fp8.add_fp8_state(variables, short, X)
    assert short.apply(refilled, X).shape == X.shape


def test_boxed_parameters():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = nn.Dense(4, kernel_init=init, dot_general_cls=fp8.Fp8DotGeneralOp)
    boxed = model.init(jax.random.key(0), X)
    for params in (boxed["params"], nn.meta.unbox(boxed["params"])):
        assert OWG in fp8.add_fp8_state({"params": params}, model, X)


def test_stacked_layers():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)(x), None

    model = nn.scan(Body, variable_axes={"params": 0, OWG: 0}, split_rngs={"params": True}, length=3)()
    variables = model.init(jax.random.key(0), X, None)
    result = fp8.add_fp8_state({"params": variables["params"]}, model, X, None)
    jax.tree.map(np.testing.assert_array_equal, result, variables)


def test_errors():
    variables = PLAIN.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="Stack has no FP8 layer"):
        fp8.add_fp8_state(variables, PLAIN, X)
    with pytest.raises(ValueError, match=r"has shape missing, but the model's parameter has \(4,\)"):
        fp8.add_fp8_state(variables, make(fp8.Fp8DotGeneralOp, layers=3), X)
    with pytest.raises(ValueError, match=r"has shape \(4,\), but the model's parameter has no such name"):
        fp8.add_fp8_state(variables, make(fp8.Fp8DotGeneralOp, layers=1), X)
    with pytest.raises(ValueError, match=r"has shape \(4,\), but the model's parameter has \(5,\)"):
        fp8.add_fp8_state(variables, make(fp8.Fp8DotGeneralOp, features=5), X)
