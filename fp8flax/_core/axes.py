"""The axes of ``jax.vmap`` and ``jax.shard_map``: how an amax merges over them, and how gradients sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._compat.varying import manual_axes

UNCHECKED = (
    "The scaling state was passed into jax.shard_map with check_vma=False. That mode adds up the gradients "
    "of replicated values, but the scaling state must merge by maximum. Leave check_vma at its default, or "
    "take the gradient inside of shard_map and reduce it with fp8flax.pmean_gradients."
)


def merge_amax(amax: jax.Array, state: jax.Array) -> jax.Array:
    """Returns the maximum of ``amax`` over all data that share ``state``.

    These are every batch of ``jax.vmap`` and every manual axis of ``jax.shard_map`` that ``amax`` has and
    ``state`` does not have. The result is batched, and varies, as ``state`` does.

    Args:
        amax: float32 scalar.
        state: float32 scalar of the state that the amax belongs to; its value does not matter.
    """
    axes = manual_axes(amax) - manual_axes(state)
    if axes:
        amax = lax.pmax(amax, tuple(sorted(axes)))
    # Neither is differentiated, also if the rest is differentiated a second time.
    return _merge_over_vmap(lax.stop_gradient(amax), lax.stop_gradient(state))


# Elementwise in two arrays of one shape. So the rule for ``jax.vmap`` can call the function again, for the
# next ``jax.vmap`` around it.
@jax.custom_batching.custom_vmap
def _merge_over_vmap(amax: jax.Array, state: jax.Array) -> jax.Array:
    """Returns ``amax``; under ``jax.vmap`` its maximum over a batch that ``state`` does not have."""
    del state
    return amax


@_merge_over_vmap.def_vmap
def _merge_over_vmap_rule(
    size: int, is_batched: list[bool], amax: jax.Array, state: jax.Array
) -> tuple[jax.Array, bool]:
    amax_batched, state_batched = is_batched
    if amax_batched and not state_batched:
        amax = jnp.max(amax, axis=0)
    elif state_batched and not amax_batched:
        amax = jnp.broadcast_to(amax, (size, *amax.shape))
    return _merge_over_vmap(amax, state), state_batched


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, each varying over the manual axes that any of them varies over."""
    axes = frozenset().union(*map(manual_axes, arrays))

    def vary(x: jax.Array) -> jax.Array:
        more = tuple(sorted(axes - manual_axes(x)))
        return lax.pcast(x, more, to="varying") if more else x

    return [vary(x) for x in arrays]


def sum_to_axes(grad: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Returns the cotangent of a value that varies over ``axes``: ``grad`` summed over its other axes."""
    excess = manual_axes(grad) - axes
    return lax.psum(grad, tuple(sorted(excess))) if excess else grad


merged_in = jax.make_user_context(None)
"""The manual axes of ``shard_map`` where ``fp8flax.value_and_grad`` was called; None outside of it."""


def current_manual_axes() -> frozenset[str]:
    """Returns the axes of the ``shard_map`` that is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def refuse_unchecked_axes() -> None:
    """Raises ``TypeError`` where JAX would add gradients of the state over devices.

    That is inside of a ``jax.shard_map`` with ``check_vma=False`` that was entered under
    ``fp8flax.value_and_grad``.
    """
    if merged_in.value is None:
        return
    entered: Any = current_manual_axes() - merged_in.value
    if entered and not manual_axes(lax.axis_index(min(entered))):
        raise TypeError(UNCHECKED)
