"""The computation of ``MLP`` and ``MoE``, with the layers that Linen or NNX makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._core.options import check_int
from fp8flax._core.plans.contraction import States
from fp8flax._core.plans.mlp import check_block, hidden, mlp
from fp8flax._core.plans.plan import explicit_sharding
from fp8flax._core.plans.ragged_dot import ON_EXPLICIT_AXES
from fp8flax._core.plans.routing import apply_experts, choose_experts, router_losses
from fp8flax._core.recipes import Recipe

Layer = Callable[[jax.Array], jax.Array]
Experts = Callable[[jax.Array, jax.Array], jax.Array]
"""Maps rows that are sorted by expert, and the number of rows of each expert, to rows."""


def layer_names(gated: bool) -> tuple[str, ...]:
    """Returns the names of the layers of a block, in the order in which ``mlp_by_layers`` takes them."""
    return ("gate", "up", "down")[not gated :]


def layer_sizes(
    inputs: int, hidden_features: int, features: int | None, gated: bool
) -> dict[str, tuple[int, int]]:
    """Returns the numbers of features that each layer of a block takes and returns, by ``layer_names``.

    Args:
        inputs: number of features of the input.
        hidden_features: number of features of the hidden layer.
        features: number of features of the result; None for as many as the input has.
        gated: whether the block has a ``gate``.
    """
    *into, down = layer_names(gated)
    last = hidden_features, inputs if features is None else features
    return {**dict.fromkeys(into, (inputs, hidden_features)), down: last}


class DenseParts(NamedTuple):
    """The parameters and the scaling state of one dense layer."""

    kernel: jax.Array
    bias: jax.Array | None
    states: States


def mlp_by_layers(x: jax.Array, layers: Sequence[Layer], activation: str) -> jax.Array:
    """Computes the layers of a feed-forward block one after the other.

    Args:
        x: the input ``(…, K)``.
        layers: ``up`` and ``down``, or ``gate``, ``up`` and ``down``.
        activation: one of ``ACTIVATIONS``.
    """
    *into, down = layers
    return down(hidden(activation, [layer(x) for layer in into]))


def mlp_as_one_op(
    x: jax.Array,
    parts: Sequence[DenseParts],
    recipe: Recipe,
    activation: str,
    names: Sequence[str],
    promote: Callable[..., list[Any]],
) -> jax.Array:
    """Computes all layers of a block as one function, with the results of ``mlp_by_layers`` up to rounding.

    Args:
        x: the input ``(…, K)``, a wide float.
        parts: the parameters and the state of each layer. Either all layers but the last have a bias, or
            none of them has one.
        recipe: a recipe for which ``runs_as_one`` is true: delayed scaling of all operands.
        activation: one of ``ACTIVATIONS``.
        names: the names of the layers, for audits.
        promote: casts arrays to the dtype of the computation; an array may be None.
    """
    # The kernels take part in the promotion, but are cast to FP8 from their own dtype.
    x, *promoted = promote(x, *(one.bias for one in parts), *(one.kernel for one in parts))
    *first_biases, last_bias = promoted[: len(parts)]
    biases = [bias for bias in first_biases if bias is not None]
    kernels = [one.kernel for one in parts]
    states = [one.states for one in parts]
    out = mlp(x, kernels, biases, states, recipe.gemms, activation, names)
    # The bias gets all dimensions, because jax_numpy_rank_promotion may be "raise".
    return out if last_bias is None else out + last_bias.reshape(*[1] * (out.ndim - 1), -1)


ROUTER: dict[str, Any] = {"use_bias": False, "dtype": jnp.float32, "precision": lax.Precision.HIGHEST}
"""The options of the dense layer that routes the tokens of ``MoE``."""

experts_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)
"""Initializer of kernels ``(num_experts, in, out)``; each expert is initialized separately."""


def check_mixture(activation: Any, gated: Any, top_k: Any, num_experts: Any, **sizes: Any) -> None:
    """Raises an error if an option of a mixture of experts is not valid; for sizes see ``check_block``."""
    check_block(activation, gated, num_experts=num_experts, **sizes)
    check_int("top_k", top_k, 1, num_experts, "A token goes to an expert once.")


def mixture(
    x: jax.Array,
    router: Layer,
    layers: Sequence[Experts],
    *,
    top_k: int,
    activation: str,
    record: Callable[[str, jax.Array], Any] | None,
) -> jax.Array:
    """Computes a mixture of experts.

    Args:
        x: the input ``(…, K)``, a wide float.
        router: maps tokens in float32, ``(tokens, K)``, to logits, ``(tokens, num_experts)``.
        layers: the experts' layers: ``up`` and ``down``, or ``gate``, ``up`` and ``down``.
        top_k: number of experts per token.
        activation: one of ``ACTIVATIONS``.
        record: takes the name and the value of each loss of the router; None if it is not needed.

    Raises:
        NotImplementedError: the input is sharded over explicit axes of a mesh.
    """
    sharding = explicit_sharding(x)
    if sharding is not None and any(sharding.spec):
        raise NotImplementedError(ON_EXPLICIT_AXES.format("MoE"))
    *into, down = layers
    tokens = lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    logits = router(tokens.astype(jnp.float32))
    routing = choose_experts(logits, top_k)
    # The losses are means over the tokens, so they need one token or more.
    if record is not None and tokens.size:
        for name, loss in router_losses(logits, routing.experts).items():
            record(name, loss)

    def of_experts(rows: jax.Array, sizes: jax.Array) -> jax.Array:
        return down(hidden(activation, [experts(rows, sizes) for experts in into]), sizes)

    out = apply_experts(tokens, routing, logits.shape[-1], of_experts)
    return out.reshape(*x.shape[:-1], out.shape[-1])
