"""The mixture of experts of docs/moe.md: routed as a loop over experts does it, and trained in FP8."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from tests import ROOT
from tests.cases import OWG, mesh, normal
from tests.pages import examples_of, run

BLOCKS = examples_of((ROOT / "docs" / "moe.md").read_text())
TOKENS, EXPERTS, WIDTH, HIDDEN = 11, 4, 8, 6
pytestmark = pytest.mark.usefixtures("promotion_of_users")


@functools.cache
def names_after(number):
    """Returns the names after the first blocks of the page, each of which runs once."""
    before = names_after(number - 1) if number else {"__name__": "page"}
    return run([BLOCKS[number]], "docs/moe.md", dict(before))


ROUTING, LINEN, NNX = range(3)


@pytest.mark.parametrize("top_k", [1, 2])
def test_it_is_a_loop_over_experts(top_k):
    """Values and gradients, beside a program that multiplies every token by every expert."""
    tokens, logits = normal(0, TOKENS, WIDTH), normal(1, TOKENS, EXPERTS)
    up, down = normal(2, EXPERTS, WIDTH, HIDDEN), normal(3, EXPERTS, HIDDEN, WIDTH)

    def ours(tokens, logits, up, down):
        def experts(rows, sizes):
            return jax.lax.ragged_dot(jnp.sin(jax.lax.ragged_dot(rows, up, sizes)), down, sizes)

        out, balance = names_after(ROUTING)["mixture"](tokens, logits, top_k, experts)
        return jnp.sum(jnp.sin(out)) + balance, (out, balance)

    def by_expert(tokens, logits, up, down):
        p = jax.nn.softmax(logits)
        chosen = p >= jnp.sort(p, axis=1)[:, -top_k, None]
        balance = EXPERTS * jnp.sum(jnp.mean(chosen, 0) / top_k * jnp.mean(p, 0))
        gates = jnp.where(chosen, p, 0.0)
        gates = gates / jnp.sum(gates, axis=1, keepdims=True)
        of_each = jnp.einsum("teh,ehn->ten", jnp.sin(jnp.einsum("tk,ekh->teh", tokens, up)), down)
        out = jnp.einsum("te,ten->tn", gates, of_each)
        return jnp.sum(jnp.sin(out)) + balance, (out, balance)

    actual, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1, 2, 3), has_aux=True))(tokens, logits, up, down)
        for f in (ours, by_expert)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected)


def test_no_tokens():
    def experts(rows, sizes):
        return jax.lax.ragged_dot(rows, normal(2, EXPERTS, WIDTH, HIDDEN), sizes)

    out, balance = names_after(ROUTING)["mixture"](
        jnp.ones((2, 0, WIDTH)), jnp.ones((2, 0, EXPERTS)), 2, experts
    )
    assert (out.shape, balance) == ((2, 0, HIDDEN), 0)


@pytest.mark.long
def test_the_linen_layer_trains():
    """Each gradient in FP8 is near that in bf16, but not equal to it; the loss is halved in 30 steps."""
    page = names_after(LINEN)
    model, x, y, step, state = (page[name] for name in ("model", "x", "y", "train_step", "state"))

    @partial(jax.jit, static_argnums=1)
    def grads_of(variables, enabled):
        def loss(variables):
            out, balance = model.apply(variables, x)
            return jnp.mean((out - y) ** 2) + 0.01 * balance

        with fp8.autocast(enabled=enabled):
            return fp8.grad(loss)(variables)["params"]

    in_fp8, wide = (grads_of(state.params, enabled) for enabled in (True, False))
    for ours, theirs in zip(*map(jax.tree.leaves, (in_fp8, wide)), strict=True):
        assert 1e-3 < np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 0.12
    losses = []
    for _ in range(30):
        state, loss = step(state, x, y)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    for name in ("up", "down"):
        op = state.params[OWG][name]["Fp8RaggedDotOp_0"]
        assert len(np.unique(op["kernel_scale"])) > 1  # each expert its own
        assert np.count_nonzero(op["output_grad_amax_history"]) == 31  # the page trains a step, too


@pytest.mark.long
def test_the_nnx_layer_trains():
    page = names_after(NNX)
    model, optimizer, x, y, step = (page[name] for name in ("model", "optimizer", "x", "y", "train_step"))
    losses = [float(step(model, optimizer, x, y)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    for experts in (model.up, model.down):
        assert len(np.unique(experts.op.kernel_scale.get_value())) > 1
        assert np.count_nonzero(experts.op.output_grad_amax_history.get_value()) == 31


@pytest.mark.long
def test_the_frozen_linen_layer_is_small():
    page = names_after(LINEN)
    model, x, variables = page["model"], page["x"], page["state"].params
    serve, served = page["serve_model"], page["serve_variables"]
    narrow, wide = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (served, variables["params"]))
    assert narrow <= 0.36 * wide
    results = (jax.jit(m.apply)(v, x) for m, v in ((serve, served), (model, variables)))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.long
def test_each_device_routes_its_own_tokens():
    """In shard_map: the gradients and the state of one call on all tokens."""
    model, x, y, variables = (names_after(LINEN)[name] for name in ("model", "x", "y", "variables"))

    def loss(variables, x, y):
        return jnp.mean((model.apply(variables, x)[0] - y) ** 2)

    def of_shard(variables, x, y):
        return jax.lax.pmean(loss(variables, x, y), "data")

    specs = P(), P("data"), P("data")
    split = jax.shard_map(of_shard, mesh=mesh(data=4), in_specs=specs, out_specs=P())
    step = jax.jit(fp8.grad(split)).lower(variables, x, y).compile()
    assert "all-gather" not in step.as_text()
    actual, expected = step(variables, x, y), jax.jit(fp8.grad(loss))(variables, x, y)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=0.05, atol=1e-3), actual["params"], expected["params"]
    )
    for name in ("up", "down"):
        states = (tree[OWG][name]["Fp8RaggedDotOp_0"] for tree in (actual, expected))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=0.02), *states)
