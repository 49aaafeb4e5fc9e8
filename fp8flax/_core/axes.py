"""Merges amaxes by maximum, and sums gradients, over the axes of ``jax.vmap`` and ``jax.shard_map``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._compat.varying import manual_axes


def merge_amax(amax: jax.Array, state: jax.Array) -> jax.Array:
    """Returns the maximum of ``amax`` over all data that share ``state``.

    The maximum is taken over each batch axis of ``jax.vmap``, and over each manual axis of
    ``jax.shard_map``, that ``amax`` has and ``state`` does not have. The result is batched, and varies over
    manual axes, as ``state`` does.

    Args:
        amax: the amax of the data, a float.
        state: the scale, or another float32 array of the shape of ``amax``, from the scaling state that the
            amax is for. Only its axes matter, not its value.

    Returns:
        The amax of the step, float32.
    """
    amax = amax.astype(jnp.float32)
    axes = manual_axes(amax) - manual_axes(state)
    if axes:
        amax = lax.pmax(amax, tuple(sorted(axes)))
    # Amaxes are constants to differentiation. A second derivative would otherwise differentiate this code.
    return _merge_over_vmap(lax.stop_gradient(amax), lax.stop_gradient(state))


# Under nested jax.vmap, the rule below calls this function again. That call handles the next outer vmap.
@jax.custom_batching.custom_vmap
def _merge_over_vmap(amax: jax.Array, state: jax.Array) -> jax.Array:
    """Returns ``amax``; under ``jax.vmap``, its maximum over a batch that ``state`` does not have."""
    del state
    return amax


@_merge_over_vmap.def_vmap
def _merge_over_vmap_rule(
    size: int, is_batched: list[bool], amax: jax.Array, state: jax.Array
) -> tuple[jax.Array, bool]:
    """Makes ``amax`` batched exactly if ``state`` is: by a maximum over the batch, or by broadcasting."""
    amax_batched, state_batched = is_batched
    if amax_batched and not state_batched:
        amax = jnp.max(amax, axis=0)
    elif state_batched and not amax_batched:
        amax = jnp.broadcast_to(amax, (size, *amax.shape))
    return _merge_over_vmap(amax, state), state_batched


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, each cast to vary over all manual axes that at least one of them varies over.

    Inside ``jax.shard_map`` our GPU kernels require this of their operands, and ``lax.scan`` requires it of
    its carry before and after a step.
    """
    axes = frozenset().union(*map(manual_axes, arrays))

    def vary(x: jax.Array) -> jax.Array:
        more = tuple(sorted(axes - manual_axes(x)))
        return lax.pcast(x, more, to="varying") if more else x

    return [vary(x) for x in arrays]


def sum_to_axes(grad: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Returns the cotangent of a value that varies over ``axes``: ``grad`` summed over its other axes."""
    excess = manual_axes(grad) - axes
    return lax.psum(grad, tuple(sorted(excess))) if excess else grad


axes_around_gradient = jax.make_user_context(None)
"""The manual axes of the ``shard_map`` around ``fp8flax.value_and_grad``, while its function is traced.

The value is None at other times. By these axes ``refuse_unchecked_axes`` finds a ``shard_map`` that was
entered inside of ``value_and_grad``. Only such a ``shard_map`` can sum the gradients of the state."""


def current_manual_axes() -> frozenset[str]:
    """Returns the manual axes of all ``jax.shard_map`` around the code that is traced now."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def refuse_unchecked_axes() -> None:
    """Raises ``TypeError`` if JAX would sum, instead of merge, the gradients of the state over devices.

    JAX does so in a ``jax.shard_map`` with ``check_vma=False`` that was entered inside of
    ``fp8flax.value_and_grad``.
    """
    if axes_around_gradient.value is None:
        return
    entered: frozenset[str] = current_manual_axes() - axes_around_gradient.value
    # The index along an axis varies over that axis. JAX does not record that under check_vma=False.
    if entered and not manual_axes(lax.axis_index(min(entered))):
        raise TypeError(
            "The scaling state was passed into jax.shard_map with check_vma=False. That mode adds up the "
            "gradients of replicated values, but the scaling state must merge by maximum. Leave check_vma "
            "at its default, or take the gradient inside of shard_map and reduce it with "
            "fp8flax.pmean_gradients."
        )
