"""``fp8flax.MoE`` computes what a loop over experts does, and reports how evenly it uses them."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from tests.cases import OWG

EXPERTS, HIDDEN, WIDTH = 4, 32, 16
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=3),
    "tensorwise": fp8.Float8CurrentScaling(),
    "block128": fp8.Float8BlockScaling(),
}
# Most of the time is the compiler's: a third of it, for programs that are a little slower.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def tokens(seed, *shape):
    return np.random.default_rng(seed).normal(size=(*shape, WIDTH)).astype(np.float32)


def layer_of(name="delayed", **fields):
    fields = {"num_experts": EXPERTS, "hidden_features": HIDDEN, **fields}
    layer = fp8.MoE(recipe=RECIPES[name], **fields)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), tokens(0, 1))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(0, leaf.shape[-2] ** -0.5, leaf.shape).astype(np.float32), shapes["params"]
    )
    return layer, fp8.add_fp8_state({"params": params}, layer, tokens(0, 1))


def dense_loop(variables, x, layer):
    """Returns the output by the formula, every expert on every token, and both losses, in float64."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), variables["params"])
    flat = x.reshape(-1, WIDTH).astype(np.float64)
    logits = flat @ params["router"]["kernel"]
    p = np.exp(logits)
    z = np.mean(np.log(p.sum(1)) ** 2)
    p /= p.sum(1, keepdims=True)
    chosen = p >= np.sort(p, axis=1)[:, -layer.top_k, None]
    balance = layer.num_experts * np.sum(chosen.mean(0) / layer.top_k * p.mean(0))
    p = p * chosen / np.sum(p * chosen, axis=1, keepdims=True)
    act = {
        "gelu": lambda h: h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))),
        "silu": lambda h: h / (1 + np.exp(-h)),
    }[layer.activation]
    out = 0
    for e in range(layer.num_experts):
        up, down = (params[name]["kernel"][e] for name in ("up", "down"))
        h = act(flat @ params["gate"]["kernel"][e]) * (flat @ up) if layer.gated else act(flat @ up)
        out = out + p[:, e, None] * (h @ down)
    return out.reshape(*x.shape[:-1], -1), {"load_balancing": balance, "router_z": z}


@pytest.mark.oldest
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gated": True, "activation": "silu", "features": 24},
        {"top_k": 1},
        {"top_k": EXPERTS, "num_experts": EXPERTS},
    ],
    ids=str,
)
def test_without_fp8_it_is_a_loop_over_experts(fields):
    layer, variables = layer_of(**fields)
    x = tokens(1, 2, 9)
    with fp8.autocast(enabled=False):
        out, aux = jit(partial(layer.apply, mutable="losses"))(variables, x)
    expected, losses = dense_loop(variables, x, layer)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    for name, loss in losses.items():
        np.testing.assert_allclose(aux["losses"][name], loss, rtol=1e-5)


@pytest.mark.oldest
@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_in_fp8_it_is_near_to_that(name):
    layer, variables = layer_of(name)
    x = tokens(1, 2, 9)
    if OWG in variables:
        variables = fp8.calibrate(layer.apply, variables, [x])
    out = jit(layer.apply)(variables, x)
    expected, _ = dense_loop(variables, x, layer)
    assert 1e-3 < np.linalg.norm(out - expected) / np.linalg.norm(expected) < 0.08


@pytest.mark.long
def test_gradients_are_those_of_the_loop():
    layer, variables = layer_of(dtype=jnp.float32)
    x = tokens(2, 7)

    def of_layer(params, x):
        with fp8.autocast(enabled=False):
            out, aux = layer.apply({**variables, "params": params}, x, mutable="losses")
        return jnp.sum(jnp.square(out)) + sum(jax.tree.leaves(aux))

    def by_expert(params, x):
        """Returns the loss of a layer that multiplies every token with every expert."""
        logits = x @ params["router"]["kernel"]
        p = nn.softmax(logits)
        chosen = p >= jnp.sort(p, axis=1)[:, -2, None]
        balance = EXPERTS * jnp.sum(jnp.mean(chosen.astype(jnp.float32), 0) / 2 * jnp.mean(p, 0))
        z = jnp.mean(jnp.square(nn.logsumexp(logits, axis=1)))
        p = jnp.where(chosen, p, 0.0)
        p = p / jnp.sum(p, axis=1, keepdims=True)
        h = nn.gelu(jnp.einsum("tk,ekh->eth", x, params["up"]["kernel"]))
        out = jnp.einsum("te,eth,ehn->tn", p, h, params["down"]["kernel"])
        return jnp.sum(jnp.square(out)) + balance + z

    actual = jit(jax.grad(of_layer, (0, 1)))(variables["params"], x)
    expected = jit(jax.grad(by_expert, (0, 1)))(variables["params"], x)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-4), actual, expected)


def test_variables_hold_parameters_and_state_alone():
    _, variables = layer_of(gated=True)
    assert sorted(variables) == [OWG, "params"]
    assert sorted(variables["params"]) == ["down", "gate", "router", "up"]
    assert variables["params"]["up"]["kernel"].shape == (EXPERTS, WIDTH, HIDDEN)
    shapes = jax.tree.map(jnp.shape, variables[OWG]["gate"]["Fp8RaggedDotOp_0"])
    assert shapes["kernel_scale"] == (EXPERTS, 1)
    assert shapes["input_amax_history"] == (3,)


def test_losses_of_a_layer_that_is_called_twice_are_added():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = fp8.MoE(num_experts=EXPERTS, hidden_features=HIDDEN, name="moe")
            return layer(layer(x))

    model, x = Twice(), tokens(0, 6)
    with fp8.autocast(enabled=False):
        variables = jit(model.init)(jax.random.key(0), x)
    assert "losses" not in variables
    with fp8.autocast(enabled=False):
        _, aux = jit(partial(model.apply, mutable="losses"))(variables, x)
        assert 1.9 < aux["losses"]["moe"]["load_balancing"] < 2 * EXPERTS
        # Without a mutable collection nothing is written.
        assert jax.eval_shape(model.apply, variables, x).shape == x.shape


def test_a_router_that_is_even_has_a_balance_of_one():
    layer, variables = layer_of()
    variables["params"]["router"]["kernel"] = jnp.zeros((WIDTH, EXPERTS))
    with fp8.autocast(enabled=False):
        _, aux = layer.apply(variables, tokens(0, 8), mutable="losses")
    np.testing.assert_allclose(aux["losses"]["load_balancing"], 1, rtol=1e-6)
    np.testing.assert_allclose(aux["losses"]["router_z"], np.log(EXPERTS) ** 2, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0), ()], ids=str)
def test_any_number_of_tokens(shape):
    layer, variables = layer_of("tensorwise")
    out, aux = layer.apply(variables, tokens(0, *shape), mutable="losses")
    assert out.shape == (*shape, WIDTH)
    assert jnp.isfinite(out).all()
    assert all(map(np.isfinite, jax.tree.leaves(aux)))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_result_is_of_its_dtype(dtype):
    layer, variables = layer_of("tensorwise", dtype=dtype)
    out = layer.apply(variables, tokens(0, 4))
    assert out.dtype == dtype
    expected, _ = dense_loop(variables, tokens(0, 4), layer)
    assert np.linalg.norm(out.astype(jnp.float32) - expected) / np.linalg.norm(expected) < 0.1


@pytest.mark.oldest
@pytest.mark.long
def test_it_trains():
    """On a piecewise target the loss with FP8 falls like that with bfloat16."""
    x = tokens(0, 256)
    y = np.where(x[:, :1] > 0, np.sin(2 * x), np.abs(x)).astype(np.float32)
    losses = {}
    for enabled in (False, True):
        layer, variables = layer_of(dtype=jnp.bfloat16, hidden_features=64)
        state = fp8.TrainState.create(
            apply_fn=layer.apply, params=variables, tx=optax.sgd(0.3, momentum=0.9)
        )

        @jit
        def step(state):
            def loss_fn(params):
                with fp8.autocast(enabled=enabled):  # noqa: B023
                    out, aux = state.apply_fn(params, x, mutable="losses")
                task = jnp.mean(jnp.square(out.astype(jnp.float32) - y))
                return task + 0.01 * aux["losses"]["load_balancing"]

            loss, grads = fp8.value_and_grad(loss_fn)(state.params)
            return state.apply_gradients(grads=grads), loss

        for _ in range(40):
            state, loss = step(state)
            losses.setdefault(enabled, []).append(float(loss))
    assert losses[True][-1] < 0.5 * losses[True][0]
    assert abs(losses[True][-1] / losses[False][-1] - 1) < 0.05
    for name in ("up", "down"):
        op = state.params[OWG][name]["Fp8RaggedDotOp_0"]
        assert (op["kernel_amax_history"] > 0).all()
        assert len(np.unique(op["kernel_scale"])) == EXPERTS  # each expert its own


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_experts": 0}, ValueError, "num_experts must be 1 or more; got 0"),
        ({"top_k": 5}, ValueError, "top_k must be"),
        ({"activation": "tanh"}, ValueError, "activation must be one of"),
        ({"gated": 1}, TypeError, "gated must be True or False; got 1"),
        ({"recipe": "delayed"}, TypeError, "recipe"),
    ],
)
def test_errors(fields, error, message):
    with pytest.raises(error, match=message):
        fp8.MoE(**{"num_experts": 4, "hidden_features": 8, **fields})


def test_explicit_axes_are_refused():
    """With FP8 off, too: there JAX would raise an error of its own."""
    layer, x = fp8.MoE(num_experts=EXPERTS, hidden_features=HIDDEN), tokens(0, 8)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    for enabled in (True, False):
        with jax.set_mesh(mesh), fp8.autocast(enabled=enabled):
            split = jax.sharding.reshard(jnp.asarray(x), P("data"))
            with pytest.raises(NotImplementedError, match=r"MoE does not run on explicit axes .*auto"):
                jax.eval_shape(layer.apply, variables, split)
