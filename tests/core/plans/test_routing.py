"""Routing of tokens to experts, beside loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.plans.routing import apply_experts, choose_experts, router_losses
from tests.cases import normal

TOKENS, EXPERTS = 7, 4
LOGITS = normal(0, TOKENS, EXPERTS)
PROBABILITIES = np.exp(np.asarray(LOGITS, np.float64))
PROBABILITIES /= PROBABILITIES.sum(1, keepdims=True)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_most_probable_experts_and_their_shares(top_k):
    found = choose_experts(LOGITS, top_k)
    for t, (gates, experts) in enumerate(zip(*found)):
        best = np.argsort(-PROBABILITIES[t])[:top_k]
        np.testing.assert_array_equal(experts, best)
        np.testing.assert_allclose(gates, PROBABILITIES[t, best] / PROBABILITIES[t, best].sum(), rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2])
def test_results_are_mixed_token_by_token(top_k):
    tokens, kernels = normal(1, TOKENS, 3), normal(2, EXPERTS, 3, 5)
    to = choose_experts(LOGITS, top_k)

    def of_experts(rows, sizes):
        assert sizes.shape == (EXPERTS,)
        np.testing.assert_array_equal(sizes, np.bincount(np.ravel(to.experts), minlength=EXPERTS))
        return jax.lax.ragged_dot(rows, kernels, sizes)

    out = apply_experts(tokens, to, EXPERTS, of_experts)
    for t in range(TOKENS):
        parts = [
            g * np.asarray(tokens)[t] @ np.asarray(kernels)[e] for g, e in zip(to.gates[t], to.experts[t])
        ]
        np.testing.assert_allclose(out[t], sum(parts), rtol=1e-4, atol=1e-5)


def test_losses():
    to = choose_experts(LOGITS, 2)
    losses = router_losses(LOGITS, to.experts)
    sent = np.bincount(np.ravel(to.experts), minlength=EXPERTS) / to.experts.size
    np.testing.assert_allclose(
        losses["load_balancing"], EXPERTS * np.sum(sent * PROBABILITIES.mean(0)), rtol=1e-5
    )
    largest = np.log(np.exp(np.asarray(LOGITS, np.float64)).sum(1))
    np.testing.assert_allclose(losses["router_z"], np.mean(largest**2), rtol=1e-5)
    even = router_losses(jnp.zeros((8, 4)), jnp.arange(8).reshape(8, 1) % 4)
    np.testing.assert_allclose(even["load_balancing"], 1.0, rtol=1e-6)
