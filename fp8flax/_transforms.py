"""What JAX's transformations must be told: how an amax merges over a batch, what has no forward mode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

FORWARD_MODE = (
    "An FP8 matmul cannot be differentiated in forward mode (jax.jvp, jax.jacfwd, jax.hessian, the "
    "function that jax.linearize returns): the backward pass carries the scaling state. Use reverse mode "
    "(jax.vjp, jax.jacrev, fp8flax.grad), or no FP8 in this call: with fp8flax.autocast(enabled=False)."
)


UNCHECKED = (
    "The scaling state went into jax.shard_map with check_vma=False, which adds the gradients of what is "
    "replicated, and does not say what that is; the state's must merge by maximum. Leave check_vma at its "
    "default, or take the gradient inside of shard_map and reduce it with fp8flax.pmean_gradients."
)


def manual_axes(x: Any) -> frozenset[str]:
    """Returns the axes of the mesh over which ``x`` varies inside ``jax.shard_map``.

    None outside of it, and with its ``check_vma=False``, which keeps no account.
    """
    aval = jax.typeof(x)
    if hasattr(aval, "vma"):  # before JAX 0.10
        return aval.vma
    return aval.manual_axis_type.varying


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, all varying over the manual axes that any of them varies over."""
    axes = frozenset().union(*map(manual_axes, arrays))

    def vary(x: jax.Array) -> jax.Array:
        more = tuple(sorted(axes - manual_axes(x)))
        return lax.pcast(x, more, to="varying") if more else x

    return [vary(x) for x in arrays]


def shape_varying_as(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a result that varies over the manual axes that ``x`` varies over."""
    if hasattr(jax.typeof(x), "vma"):  # before JAX 0.10
        return jax.ShapeDtypeStruct(shape, dtype, vma=manual_axes(x))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


@jax.custom_batching.custom_vmap
def _merge_over_vmap(amax: jax.Array, state: jax.Array) -> jax.Array:
    """Returns ``amax``; under ``jax.vmap`` its maximum over a batch that ``state`` does not have.

    Elementwise in two arrays of one shape, so that it can stand in its own rule, for the next ``vmap``.
    """
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


def merge_amax(amax: jax.Array, state: jax.Array) -> jax.Array:
    """Returns the maximum of ``amax`` over all the data that shares ``state``.

    That is, over every batch of ``jax.vmap`` and every manual axis of ``jax.shard_map`` that ``amax`` has
    and ``state`` has not. The result is batched, and varies, as ``state`` is.

    Args:
        amax: float32 scalar.
        state: float32 scalar out of the state that the amax belongs to; its value does not matter.
    """
    axes = manual_axes(amax) - manual_axes(state)
    if axes:
        amax = lax.pmax(amax, tuple(sorted(axes)))
    # Neither is differentiated, even where the rest is for a second time.
    return _merge_over_vmap(lax.stop_gradient(amax), lax.stop_gradient(state))


merged_in = jax.make_user_context(None)
"""The manual axes of ``shard_map`` where ``fp8flax.value_and_grad`` was called; None outside of it."""


def current_manual_axes() -> frozenset[str]:
    """Returns the axes of the ``shard_map`` that is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def refuse_unchecked_axes() -> None:
    """Raises ``TypeError`` where JAX would add the state's gradients over devices, which it cannot."""
    if merged_in.value is None:
        return
    entered = current_manual_axes() - merged_in.value
    if entered and not manual_axes(lax.axis_index(min(entered))):
        raise TypeError(UNCHECKED)


def sum_to_axes(grad: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Returns the cotangent of a value that varies over ``axes``: summed over all others it varies over."""
    excess = manual_axes(grad) - axes
    return lax.psum(grad, tuple(sorted(excess))) if excess else grad


# The tangent of an operand. Reverse mode only transposes it; forward mode would compute it, and learns
# that it cannot. (JAX's own error for a custom_vjp names neither the op nor a way out.)
_tangent_p = Primitive("fp8_tangent")


def _refuse(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise TypeError(FORWARD_MODE)


_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_tangent_p, _refuse)
ad.deflinear2(_tangent_p, lambda ct, _: [ct])
batching.primitive_batchers[_tangent_p] = lambda args, dims: (_tangent_p.bind(*args), dims[0])


@jax.custom_jvp
def reverse_mode_only(x: jax.Array) -> jax.Array:
    """Returns ``x``; differentiated in forward mode it raises ``TypeError``."""
    return x


@reverse_mode_only.defjvp
def _reverse_mode_only_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    return reverse_mode_only(primals[0]), _tangent_p.bind(tangents[0])
