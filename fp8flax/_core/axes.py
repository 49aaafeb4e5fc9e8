"""The axes of ``jax.vmap``, of ``jax.shard_map``, and of meshes with explicit axes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8flax._core.types import PyTree


def manual_axes(x: jax.Array) -> frozenset[str]:
    """Returns the axes of the mesh over which ``x`` varies inside ``jax.shard_map``.

    The set is empty outside of ``shard_map``, and under ``check_vma=False``, where JAX does not record it.
    """
    return jax.typeof(x).manual_axis_type.varying


def merge_amax(amax: jax.Array, state: jax.Array) -> jax.Array:
    """Returns the maximum of ``amax``, in float32, over all data that share ``state``, such as a scale.

    The maximum is taken over each batch axis of ``jax.vmap``, and over each manual axis of
    ``jax.shard_map``, that ``amax`` has and ``state`` does not have. The result has the axes of ``state``.
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


def explicit_axes(x: jax.Array) -> tuple[str, ...]:
    """Returns the names of the explicit axes of the mesh that an array lies on."""
    mesh = jax.typeof(x).sharding.mesh
    return tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)


def on_automatic_axes(
    f: Callable[..., PyTree], x: jax.Array, out_sharding: PyTree = None
) -> Callable[..., PyTree]:
    """Returns ``f``, inside of which the explicit axes of the mesh of ``x`` are automatic.

    JAX cannot derive the sharding of a reshape, or of a product that sums over devices. Without
    ``out_sharding`` the results are replicated.
    """
    axes, replicated = explicit_axes(x), NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec())
    out_sharding = replicated if out_sharding is None else out_sharding
    return jax.sharding.auto_axes(f, axes=axes, out_sharding=out_sharding) if axes else f
