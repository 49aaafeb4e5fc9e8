"""Routing of a mixture of experts: chooses experts for each token, sorts tokens by expert, sums results."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Routed(NamedTuple):
    """The chosen experts of each token, and their weights."""

    gates: jax.Array
    """The weight of each chosen expert, ``(tokens, top_k)``, float32."""
    experts: jax.Array
    """The index of each chosen expert, ``(tokens, top_k)``, integers."""


def choose_experts(logits: jax.Array, top_k: int) -> Routed:
    """Chooses the ``top_k`` most probable experts of each token.

    The weights of the chosen experts are their probabilities, divided by the sum of these.

    Args:
        logits: the logits of the router, ``(tokens, experts)``, float32.
        top_k: the number of experts per token.
    """
    largest, experts = lax.top_k(jax.nn.softmax(logits), top_k)
    return Routed(largest / jnp.sum(largest, axis=1, keepdims=True), experts)


def router_losses(logits: jax.Array, experts: jax.Array) -> dict[str, jax.Array]:
    """Returns the load-balancing loss and the z-loss of the router, which a user adds to the loss.

    Args:
        logits: the logits of the router, ``(tokens, experts)``, float32; one token or more.
        experts: the indices of the chosen experts, ``(tokens, top_k)``.
    """
    num_experts = logits.shape[1]
    sent = jnp.bincount(experts.reshape(-1), length=num_experts).astype(jnp.float32) / experts.size
    mean = jnp.mean(jax.nn.softmax(logits), axis=0)
    return {
        "load_balancing": num_experts * jnp.sum(lax.stop_gradient(sent) * mean),
        "router_z": jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1))),
    }


def apply_experts(
    tokens: jax.Array,
    to: Routed,
    num_experts: int,
    of_experts: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Returns ``sum_e gate[t, e] * expert[e](token[t])``, ``(tokens, features)``.

    Args:
        tokens: the tokens, ``(tokens, K)``.
        to: the experts of each token, and their weights.
        num_experts: the number of experts.
        of_experts: a function that applies the experts to rows. It is called with rows ``(tokens * top_k,
            K)``, sorted by expert, and the number of rows of each expert ``(experts,)``. It returns
            ``(tokens * top_k, features)``.
    """
    # Row i is a copy of token order[i] // top_k, for one of its experts. Rows are sorted by expert, and
    # sorted back by token. Gradients of these permutations are permutations as well. A general scatter
    # would add rows in an order that may change from run to run.
    order = jnp.argsort(to.experts.reshape(-1))
    sizes = jnp.bincount(to.experts.reshape(-1), length=num_experts)
    rows = of_experts(_permuted(jnp.repeat(tokens, to.experts.shape[1], axis=0), order), sizes)
    of_tokens = _permuted(rows, jnp.argsort(order)).reshape(*to.gates.shape, rows.shape[1])
    return jnp.sum(of_tokens.astype(jnp.float32) * to.gates[..., None], axis=1).astype(rows.dtype)


def _permuted(x: jax.Array, order: jax.Array) -> jax.Array:
    """Returns the rows of ``x`` in the order of a permutation."""
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")
