"""The delayed-scaling state of one tensor: the scale of a step, and the state after it.

A step derives its scale from the amaxes of earlier steps. Then the amax of this step enters the history.

Inside of a gradient, an array of the dtype ``fp8_meta`` (Transformer Engine's word) takes the place of the
scale::

    value       the old scale; the scales of this step in e4m3fn and in e5m2
    cotangent   the scale that was used; the amax of this step; zero

JAX merges the cotangents of several uses by maximum. ``tree.enter`` makes the metas of all tensors of a
model together. ``step_scales`` gives an op its scales, and makes the metas of states that did not enter. So
the "gradient" of a state is always its ``next_state``.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8flax._compat.max_dtype import from_max_dtype, is_max_dtype, to_floats
from fp8flax._compat.provenance import is_constant_of_loop
from fp8flax._core.formats import fp8_max
from fp8flax._core.names import RESIDUAL_NAMES
from fp8flax._core.quantize import on_cotangent
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.scaling import amax_to_scale, is_usable, push_amax
from fp8flax._core.shapes import Float32, Shaped
from fp8flax._core.state.meta import fp8_meta, pack_meta, unpack_meta
from fp8flax._core.state.stacking import for_each_tensor
from fp8flax._core.types import PyTree

_, _, _SCALING_NAME = RESIDUAL_NAMES

Arrays: TypeAlias = list[jax.Array]


class ScalingState(NamedTuple):
    """The delayed-scaling state of one tensor, or of several that are stacked, such as experts' kernels.

    Both arrays are float32, or ``fp32_max_grad`` in a function that is differentiated.
    """

    scale: Shaped[jax.Array, "*scale"]
    """Shape ``(1,)``, or ``(*stack, 1)`` if tensors are stacked; ``in_qdq`` also takes a scalar. Or
    ``fp8_meta`` in its place."""
    amax_history: Shaped[jax.Array, "*stack length"]
    """Shape ``(amax_history_len,)``, or ``(*stack, amax_history_len)``. The newest entry is at index 0."""


def check_state_dtype(where: str, x: object) -> None:
    """Raises ``TypeError`` if a leaf of scaling state is neither float32 nor merges by maximum."""
    if not (is_max_dtype(x) or getattr(x, "dtype", None) == jnp.float32):
        got = getattr(x, "dtype", None) or type(x).__name__
        raise TypeError(
            f"The scaling state {where} must be float32; got {got}. Cast the parameters alone, or cast "
            "this leaf back with .astype(jnp.float32)."
        )


def warn_if_constant_of_loop(scale: object, stacklevel: int) -> None:
    """Warns if a gradient is taken in the body of a loop of JAX that does not carry the scaling state."""
    if is_constant_of_loop(scale):
        warnings.warn(
            "A gradient in the body of lax.scan, or of another loop, gives the next FP8 scaling state, and "
            "the loop does not carry the state: each pass starts from the same one. The sum, the mean or "
            "the last of these next states is not the state after the loop; only their maximum is. For "
            "microbatches call fp8flax.accumulate_gradients. For steps of training, carry the state in the "
            "loop.",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def on_device(x: jax.Array) -> jax.Array:
    """Returns a copy in device memory of an array in host memory, where JAX does not compute."""
    is_on_device = jax.typeof(x).memory_space == jax.memory.Space.Device
    return x if is_on_device else jax.device_put(x, jax.memory.Space.Device)


# The scale of a step.


@partial(jax.jit, static_argnums=0)
def step_scale(quantizer: DelayedQuantizer, state: ScalingState) -> Float32[jax.Array, "*stack"]:
    """Returns the scale of this step, from a float32 state with the amaxes of earlier steps.

    The shape is that of the history without its last axis.
    """
    takes_newest = quantizer.amax_compute_algo == "most_recent"
    amax = state.amax_history[..., 0] if takes_newest else jnp.max(state.amax_history, -1)
    scale = state.scale.reshape(amax.shape)
    # A NaN marks a state that no step can make (see ``_train.check``): the results must be NaN, too.
    is_marked = scale != scale
    amax, old = jnp.where(is_marked, 0.0, amax), jnp.where(is_usable(scale) | is_marked, scale, 1.0)
    return amax_to_scale(amax, fp8_max(quantizer.dtype), quantizer.rounding, quantizer.margin, old)


# A meta has the scales of ``DelayedScaling()``, because a GPU computes those of all tensors in a few
# kernels (``stacking.for_each_tensor``). An op with other options computes its scale from the history.
_IN_META = {DelayedQuantizer(dtype=jnp.float8_e4m3fn): 1, DelayedQuantizer(dtype=jnp.float8_e5m2): 2}
"""The place of each quantizer's scale in a meta, whatever the length of the history."""


def _meta_numbers(state: ScalingState) -> tuple[jax.Array, ...]:
    """Returns the three numbers of the meta of a float32 state, each in the shape of the scale."""
    largest = state._replace(amax_history=jnp.max(state.amax_history, -1, keepdims=True))
    return state.scale, *(step_scale(quantizer, largest)[..., None] for quantizer in _IN_META)


def named_scaling(numbers: PyTree) -> PyTree:
    """Returns scales or amaxes under the ``checkpoint_name`` that policies of ``jax.checkpoint`` use."""
    return jax.tree.map(partial(checkpoint_name, name=_SCALING_NAME), numbers)


def step_scales(quantizers: Sequence[DelayedQuantizer], states: Sequence[ScalingState]) -> Arrays:
    """Returns the ``step_scale`` of each state to an op, which returns the amaxes of all, or of none.

    An amax is the cotangent of its scale, after ``merge_amax``. Then the "gradient" of the state is its
    ``next_state``. Use the scales in one op. They have no derivative of any order.
    """
    states = with_metas([ScalingState(*map(on_device, state)) for state in states])
    scales = _read_metas(tuple(quantizers), states)
    return on_cotangent(_amaxes_in_metas, scales, [meta for meta, _ in states], scales)


@partial(jax.jit, static_argnums=0)
def _read_metas(quantizers: tuple[DelayedQuantizer, ...], states: list[ScalingState]) -> Arrays:
    """Returns the scales of this step, of states with metas."""
    scales, usual_length = [], DelayedQuantizer.amax_history_len
    for quantizer, (meta, history) in zip(quantizers, states):
        place = _IN_META.get(dataclasses.replace(quantizer, amax_history_len=usual_length))
        numbers = [x.reshape(history.shape[:-1]) for x in unpack_meta(meta)]
        own = ScalingState(numbers[0], history)
        scales.append(step_scale(quantizer, own) if place is None else numbers[place])
    return named_scaling(scales)


@jax.jit
def _amaxes_in_metas(amaxes: Arrays, scales: Arrays) -> tuple[None, Arrays]:
    """Returns the cotangents of the metas: the scales and the amaxes of this step."""
    numbers = [(x[..., None] for x in (s, a, jnp.zeros_like(s))) for s, a in zip(scales, amaxes)]
    return None, [pack_meta(*three) for three in numbers]


def with_metas(states: Sequence[ScalingState]) -> list[ScalingState]:
    """Returns states with a meta in the place of each scale; makes the missing metas together.

    The "gradients" of the metas are those of the whole states: the next states.
    """
    missing = [ScalingState(*map(to_floats, x)) for x in states if x.scale.dtype != fp8_meta]
    missing = [x._replace(scale=x.scale.reshape(*x.amax_history.shape[:-1], 1)) for x in missing]
    metas: Iterator[jax.Array] = iter(())
    if missing:  # tracing a function with a derivative of its own costs time, also for no states
        # Each meta is an array of its own. XLA for GPUs would need one kernel per tensor to split an array
        # of all metas.
        numbers = for_each_tensor(_meta_numbers, lax.stop_gradient(missing))
        made = [pack_meta(*three) for three in numbers]
        # The cotangents of the metas are the next states of ``missing``, which depend on those before.
        metas = iter(on_cotangent(lambda g, states: (None, next_states(states, g)), made, missing, missing))
    return [
        ScalingState(
            scale if scale.dtype == fp8_meta else next(metas),
            lax.stop_gradient(from_max_dtype(history)),
        )
        for scale, history in states
    ]


# The state after a step.


def next_states(states: Sequence[ScalingState], cotangents: Arrays) -> list[ScalingState]:
    """Returns the states after a step, from the cotangents of their metas."""
    numbers = zip(*(unpack_meta(g, 2) for g in cotangents))
    made = for_each_tensor(next_state, states, *numbers, large_results=True)
    return list(map(next_state_of, states, made))


def next_state(old: ScalingState, scale: jax.Array, amax: jax.Array) -> ScalingState:
    """Returns the state after a step, from its scale and amax, both in the shape of the old scale."""
    return kept_state(old, ScalingState(scale, push_amax(amax[..., 0], old.amax_history)), amax)


def kept_state(old: ScalingState, new: ScalingState, newest: jax.Array) -> ScalingState:
    """Returns ``new`` where it is valid, and ``old`` elsewhere; each of several stacked tensors by itself.

    If the scale is not positive and finite, no gradient arrived: the old state is kept. If the newest amax
    is not finite, the data held a NaN or an Inf, or were empty: the old history is kept.
    """
    has_gradient = lax.is_finite(new.scale) & (new.scale > 0)
    enters = has_gradient & lax.is_finite(newest) & (newest >= 0)
    return ScalingState(
        jnp.where(has_gradient, new.scale, old.scale),
        jnp.where(enters, new.amax_history, old.amax_history),
    )


@jax.jit
def next_state_of(old: ScalingState, new: ScalingState) -> ScalingState:
    """Returns ``new``. ``_train.check`` finds the call by this function's name: ``new`` follows ``old``."""
    # A name does nothing. But JAX takes a result that is an argument, as it is, for no result of the call.
    return jax.tree.map(partial(checkpoint_name, name="fp8_next_state"), new)


@partial(jax.jit, static_argnums=0)
def calibrated_state(
    quantizer: DelayedQuantizer, old: ScalingState, amax: Float32[jax.Array, "*scale"]
) -> ScalingState:
    """Returns the state after calibration, with the scale that the next training step uses.

    So the scale follows from ``amax``. In a training step it follows from earlier amaxes only. The amax is
    that of all data, in the shape of the scale. It is -inf without data: the state is kept.
    """
    history = push_amax(amax[..., 0], jnp.zeros_like(old.amax_history))
    scale = step_scale(quantizer, ScalingState(jnp.ones_like(old.scale), history))[..., None]
    return jax.tree.map(partial(jnp.where, amax > -jnp.inf), ScalingState(scale, history), old)
