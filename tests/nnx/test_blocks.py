"""``fp8nnx.MLP`` and ``fp8nnx.MoE`` compute, bit for bit, what ``fp8.MLP`` and ``fp8.MoE`` do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax._core import blocks
from tests.cases import OWG, cells, normal
from tests.nnx.layout import to_linen

SHORT = fp8.DelayedScaling(amax_history_len=4)
WIDTH, HIDDEN = 32, 48
X = normal(0, 8, WIDTH)


def steps_are_equal(model, linen_model, variables, factors=(1.0, 3.0)):
    """Runs both frameworks in one program, so that it is compiled once."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def both(state, variables, x):
        ours = fp8nnx.value_and_grad(lambda s: jnp.sum(jnp.sin(nnx.merge(graphdef, s)(x))))(state)
        return ours, fp8.value_and_grad(lambda v: jnp.sum(jnp.sin(linen_model.apply(v, x))))(variables)

    for factor in factors:
        (value, grads), (expected, expected_grads) = both(state, variables, factor * X)
        np.testing.assert_array_equal(value, expected)
        found = nnx.clone(model)
        nnx.update(found, grads)
        found = {name: tree for name, tree in to_linen(found).items() if name in variables}
        jax.tree.map(np.testing.assert_array_equal, found, expected_grads)
        fp8nnx.overwrite_state(model, grads)
        state = nnx.state(model)
        variables = {**expected_grads, "params": variables["params"]}


MLPS = {
    "gated": {"activation": "silu", "gated": True, "use_bias": True, "dtype": jnp.bfloat16},
    "plain": {"features": 16},
    "current": {"recipe": fp8.Float8CurrentScaling()},  # which is computed layer by layer
}


@pytest.mark.long
@pytest.mark.parametrize("name", MLPS)
def test_mlp_is_that_of_linen(name):
    fields = {"recipe": SHORT, **MLPS[name]}
    model = fp8nnx.MLP(WIDTH, HIDDEN, **fields, rngs=nnx.Rngs(0))
    steps_are_equal(model, fp8.MLP(HIDDEN, **fields), to_linen(model))


def block(**fields):
    return fp8nnx.MLP(WIDTH, HIDDEN, recipe=SHORT, rngs=nnx.Rngs(0), **fields)


def test_mlp_is_one_where_it_can_be(monkeypatch):
    """In all other cases the block runs its layers one after the other."""
    calls = []
    one = blocks.mlp
    monkeypatch.setattr(blocks, "mlp", lambda *args: calls.append(args[-1]) or one(*args))

    def is_one(model):
        calls.clear()
        jax.eval_shape(lambda state: nnx.merge(nnx.graphdef(model), state)(X), nnx.state(model))
        return calls

    model = block(gated=True)
    assert is_one(model) == [["gate", "up", "down"]]
    converted = fp8nnx.quantize_model(nnx.Dict(mlp=model), include="nothing", allow_unmatched=True)["mlp"]
    assert is_one(converted) == [["mlp/gate", "mlp/up", "mlp/down"]]
    with fp8.autocast(enabled=False):
        assert not is_one(model)
    model.up.dot_general = nnx.data(fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling()))
    assert not is_one(model)
    model.up.dot_general = nnx.data(fp8nnx.Fp8DotGeneralOp(recipe=SHORT, form="qdq"))
    assert not is_one(model)
    lora = nnx.LoRALinear(
        WIDTH, HIDDEN, lora_rank=2, use_bias=False, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0)
    )
    for name, value in (("up", lora), ("precision", jax.lax.Precision.HIGHEST), ("dtype", jnp.float32)):
        model = block()
        assert is_one(model) == [["up", "down"]]
        setattr(model if name == "up" else model.up, name, value)
        assert not is_one(model)
    model = block(gated=True, use_bias=True)
    assert is_one(model) == [["gate", "up", "down"]]
    model.gate = nnx.Linear(
        WIDTH, HIDDEN, use_bias=False, dot_general=fp8nnx.Fp8DotGeneralOp(recipe=SHORT), rngs=nnx.Rngs(0)
    )
    assert not is_one(model)
    for wrong in ({"activation": "tanh"}, {"features": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            block(**wrong)


@pytest.mark.long
def test_mlp_is_calibrated_measured_reported_and_frozen():
    model = fp8nnx.quantize_model(block(), include="nothing", allow_unmatched=True)
    fp8nnx.calibrate(lambda model, x: model(x), model, [X])
    assert model.down.dot_general.input_amax_history.get_value()[0] > 0
    rows = fp8nnx.report(model, X).rows
    assert [(row.path, row.reason) for row in rows] == [
        ("up", "an op of its own"),
        ("down", "an op of its own"),
    ]
    graphdef, state = nnx.split(model)
    found = jax.jit(fp8.statistics(lambda state: jnp.sum(nnx.merge(graphdef, state)(X))))(state)
    assert set(found) == {"up", "down"}
    frozen = fp8nnx.freeze(model, X)
    assert frozen.down.kernel.get_value().dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(frozen(X), model(X), rtol=1e-4, atol=1e-5)


MOES = {
    "gated": {"gated": True, "activation": "silu", "features": 16, "dtype": jnp.bfloat16},
    "plain": {"top_k": 1},
}


@pytest.mark.long
@pytest.mark.parametrize("name", cells(MOES, repeated=["plain"]))
def test_moe_is_that_of_linen(name):
    fields = {"num_experts": 4, "hidden_features": HIDDEN, "recipe": SHORT, **MOES[name]}
    model = fp8nnx.MoE(WIDTH, **fields, rngs=nnx.Rngs(0))
    linen_model, variables = fp8.MoE(**fields), to_linen(model)
    assert set(variables) == {"params", OWG}
    steps_are_equal(model, linen_model, variables)
    variables = to_linen(model)
    assert variables[OWG]["up"]["Fp8RaggedDotOp_0"]["input_amax_history"][0] > 0

    @nnx.jit
    def with_losses(model):
        def loss(model):
            out = jnp.sum(model(X).astype(jnp.float32))
            return out + sum(jax.tree.leaves(nnx.state(model, fp8nnx.RouterLoss)))

        return fp8nnx.grad(loss)(model)

    def linen_loss(variables):
        out, aux = linen_model.apply(variables, X, mutable="losses")
        return jnp.sum(out.astype(jnp.float32)) + sum(jax.tree.leaves(aux)), aux["losses"]

    expected, losses = jax.jit(fp8.grad(linen_loss, has_aux=True))(variables)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(with_losses(model)["router"]["kernel"].get_value(), expected["params"]["router"]["kernel"])
    for loss, value in losses.items():
        close(getattr(model, loss).get_value(), value)


class Mixture(nnx.Module):
    def __init__(self):
        recipe = fp8.Float8CurrentScaling()
        self.moe = fp8nnx.MoE(WIDTH, 4, HIDDEN, recipe=recipe, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.moe(x)


@pytest.mark.long
def test_model_whose_only_ops_are_of_experts():
    model = fp8nnx.quantize_model(Mixture())
    (row,) = fp8nnx.report(model, X).rows
    assert (row.path, row.converted) == ("moe/router", False)
    graphdef, state = nnx.split(model)
    found = jax.jit(fp8.statistics(lambda state: jnp.sum(nnx.merge(graphdef, state)(X))))(state)
    assert set(found) == {"moe/up/ragged_dot", "moe/down/ragged_dot"}
    with jax.enable_x64(True):
        model(X)
    assert model.moe.load_balancing.get_value().dtype == jnp.float32


@pytest.mark.long
def test_moe_of_no_tokens_and_wrong_arguments():
    model = fp8nnx.MoE(WIDTH, 4, HIDDEN, recipe=fp8.Float8CurrentScaling(), rngs=nnx.Rngs(0))
    assert model(X[:0]).shape == (0, WIDTH)
    with pytest.raises(ValueError, match="A token goes to an expert once"):
        fp8nnx.MoE(WIDTH, 4, HIDDEN, top_k=5, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="was called with operands, as its instances are.$"):
        fp8nnx.Fp8RaggedDotOp(X)
