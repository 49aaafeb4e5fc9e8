"""A mixture of experts but for its matmuls: which tokens go to whom, and what comes back of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Routed(NamedTuple):
    """Where tokens go."""

    gates: jax.Array
    """Of each token's experts, ``(tokens, top_k)``, float32."""
    experts: jax.Array
    """Which they are, likewise, integers."""


def routed(logits: jax.Array, top_k: int) -> Routed:
    """Returns the experts with the largest probabilities, and these, made to sum to one."""
    largest, experts = lax.top_k(jax.nn.softmax(logits), top_k)
    return Routed(largest / jnp.sum(largest, axis=1, keepdims=True), experts)


def router_losses(logits: jax.Array, experts: jax.Array) -> dict[str, jax.Array]:
    """Returns what a loss should add, see ``fp8flax.MoE``; there must be a token."""
    num_experts = logits.shape[1]
    sent = jnp.bincount(experts.reshape(-1), length=num_experts).astype(jnp.float32) / experts.size
    mean = jnp.mean(jax.nn.softmax(logits), axis=0)
    return {
        "load_balancing": num_experts * jnp.sum(lax.stop_gradient(sent) * mean),
        "router_z": jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1))),
    }


def mixed(
    tokens: jax.Array,
    to: Routed,
    num_experts: int,
    of_experts: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Returns ``sum_e gate[t, e] * expert[e](token[t])``, ``(tokens, features)``.

    Args:
        tokens: ``(tokens, K)``.
        to: where they go.
        num_experts: how many experts there are.
        of_experts: ``of_experts(rows, sizes)``, all experts on rows ``(tokens * top_k, K)`` that are
            sorted by expert, ``sizes`` of them for each; returns ``(tokens * top_k, features)``.
    """
    # Row i is a copy of token order[i] // top_k for one of its experts; rows are sorted by expert. Both
    # ways are permutations, whose gradients are again: nothing is added in an order that may change.
    order = jnp.argsort(to.experts.reshape(-1))
    sizes = jnp.bincount(to.experts.reshape(-1), length=num_experts)
    rows = of_experts(_permuted(jnp.repeat(tokens, to.experts.shape[1], axis=0), order), sizes)
    of_tokens = _permuted(rows, jnp.argsort(order)).reshape(*to.gates.shape, rows.shape[1])
    return jnp.sum(of_tokens.astype(jnp.float32) * to.gates[..., None], axis=1).astype(rows.dtype)


def _permuted(x: jax.Array, order: jax.Array) -> jax.Array:
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")
