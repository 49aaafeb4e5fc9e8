"""The blocks with plain functions as layers, beside NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.blocks import mixture, mlp_by_layers
from tests.cases import normal

X, UP, GATE, DOWN = (normal(i, *shape) for i, shape in enumerate([(2, 3, 8), (8, 6), (8, 6), (6, 4)]))


@pytest.mark.parametrize("gated", [False, True])
def test_the_layers_of_a_feed_forward_block(gated):
    kernels = [GATE, UP, DOWN] if gated else [UP, DOWN]
    out = mlp_by_layers(X, [lambda x, w=w: x @ w for w in kernels], "relu")
    active = np.maximum(np.asarray(X) @ kernels[0], 0)
    np.testing.assert_allclose(out, (active * (X @ UP) if gated else active) @ DOWN, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_a_mixture_in_which_each_expert_scales():
    """Expert e multiplies by e + 1, so that the result shows the experts and the gates of each token."""
    logits, losses = normal(9, 6, 3), {}

    def scaled(rows, sizes):
        return rows * jnp.repeat(jnp.arange(1.0, 4.0), sizes, total_repeat_length=len(rows))[:, None]

    out = mixture(
        jnp.abs(X),
        lambda tokens: logits,
        [scaled, lambda rows, sizes: rows],
        top_k=2,
        activation="relu",
        record=losses.__setitem__,
    )
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    best = np.argsort(-probabilities, axis=1)[:, :2]
    gates = np.take_along_axis(probabilities, best, 1)
    factor = np.sum(gates / gates.sum(1, keepdims=True) * (best + 1), axis=1)
    np.testing.assert_allclose(out, np.abs(X) * factor.reshape(2, 3, 1), rtol=1e-5)
    assert sorted(losses) == ["load_balancing", "router_z"]
